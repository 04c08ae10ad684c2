// Any bytes as a compressed gradient: one whose blocks can all be expanded, or a typed error.
// Input: one byte of choices, then the message.
#include <cstring>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/compress/message.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace smartinf;
  if (size == 0) return 0;
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  std::vector<std::byte> message(bytes + 1, bytes + size);
  if ((data[0] & 1u) != 0 && message.size() >= sizeof(compress::CompressedHeader)) {
    const uint64_t length = message.size();
    std::memcpy(message.data() + offsetof(compress::CompressedHeader, bytes), &length, 8);
    std::memcpy(message.data() + offsetof(compress::CompressedHeader, version),
                &compress::kCompressedVersion, sizeof compress::kCompressedVersion);
    compress::seal_compressed(message);
  }
  const auto view = compress::CompressedView::parse(message);
  if (!view.ok()) return 0;
  std::vector<std::byte> out(base::kBlockElements * 4);
  std::vector<float> factors(view->factors());
  for (uint64_t run = 0; run < view->runs(); ++run) {
    view->read_factors(run, 0, factors);
    for (const float factor : factors) SI_CHECK(factor >= 0, "a factor of the second moment");
    if (run == 3) break;  // they may be many
  }
  for (uint64_t block = 0; block < view->blocks(); ++block) {
    SI_CHECK(view->values(block) <= base::kBlockElements, "more values than elements");
    view->expand_block(block, out.data());
  }
  return 0;
}
