#include "smartinf/base/units.h"

#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include <fmt/format.h>

namespace smartinf::base {
namespace {

std::string scaled(double value, double unit, const std::array<const char*, 6>& names) {
  size_t index = 0;
  while (value >= unit && index + 1 < names.size()) {
    value /= unit;
    ++index;
  }
  if (index == 0) return fmt::format("{:.0f}{}", value, names[index]);
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f}{}", value, decimals, names[index]);
}

}  // namespace

std::string format_bytes(uint64_t bytes) {
  return scaled(static_cast<double>(bytes), 1024.0, {" B", " KiB", " MiB", " GiB", " TiB", " PiB"});
}

std::string format_rate(double bytes_per_second) {
  return scaled(bytes_per_second, 1000.0, {" B/s", " KB/s", " MB/s", " GB/s", " TB/s", " PB/s"});
}

std::string format_count(double count) {
  return scaled(count, 1000.0,
                {"", " thousand", " million", " billion", " trillion", " quadrillion"});
}

std::string format_seconds(double seconds) {
  if (seconds < 0.0995) return fmt::format("{:.3g} ms", seconds * 1e3);
  if (seconds < 99.5) return fmt::format("{:.3g} s", seconds);
  const auto whole = static_cast<uint64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

Result<uint64_t> parse_bytes(std::string_view text) {
  const std::string original(text);
  const auto fail = [&](std::string_view why) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("'{}' is not a size: {}", original, why),
                  "Write a number with a unit, e.g. 512MiB, 4GiB or 1.5GB.");
  };
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number))
    return fail("the text does not begin with a number");
  if (number < 0) return fail("the number is negative");
  std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  static constexpr std::array<std::pair<std::string_view, double>, 11> kUnits{{
      {"", 1.0},
      {"B", 1.0},
      {"KiB", 1024.0},
      {"MiB", 1048576.0},
      {"GiB", 1073741824.0},
      {"TiB", 1099511627776.0},
      {"KB", 1e3},
      {"MB", 1e6},
      {"GB", 1e9},
      {"TB", 1e12},
      {"kB", 1e3},
  }};
  for (const auto& [name, factor] : kUnits) {
    if (unit != name) continue;
    const double bytes = number * factor;
    if (bytes >= 1.8e19) return fail("the number does not fit in 64 bits");
    return static_cast<uint64_t>(std::llround(bytes));
  }
  return fail(fmt::format("unknown unit '{}'", unit));
}

}  // namespace smartinf::base
