// A recipe is any text, and so are flags: bytes before the first NUL are the file, every line
// behind it is KEY=VALUE. A recipe that is accepted must survive being printed and read again.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/config/recipe.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace smartinf;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t middle = std::min(input.find('\0'), input.size());
  std::vector<std::string> words;
  for (std::string_view rest = input.substr(std::min(middle + 1, input.size())); !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    words.emplace_back("--set");
    words.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  const base::Result<std::vector<config::Override>> overrides = config::take_overrides(words);
  if (!overrides.ok()) return 0;
  const auto loaded = config::parse_recipe(input.substr(0, middle), "fuzz.toml", *overrides);
  if (!loaded.ok()) {
    SI_CHECK(!loaded.status().to_string().empty(), "a failure says nothing");
    return 0;
  }
  const std::string printed = config::print_recipe(*loaded);
  auto again = config::parse_recipe(printed, "fuzz.toml", {});
  SI_CHECK(again.ok(), again.ok() ? "" : again.status().to_string());
  again->origins = loaded->origins;
  SI_CHECK(config::print_recipe(*again) == printed, "printing is not stable");
  return 0;
}
