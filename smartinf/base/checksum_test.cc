#include "smartinf/base/checksum.h"

#include <vector>

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

std::vector<std::byte> counting_bytes(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 131 + (i >> 8));
  return bytes;
}

// Written on every drive there is: these values must never change, on any machine. They are those
// of Debian's libxxhash without its instruction-set dispatch.
TEST(Checksum, ValuesAreFixed) {
  const std::vector<std::byte> bytes = counting_bytes(262144);
  const std::span<const std::byte> all(bytes);
  EXPECT_EQ(checksum(all.first(0), 0), 0x2d06800538d394c2u);
  EXPECT_EQ(checksum(all.first(100), 7), 0x3cbf5450f6660a84u);
  EXPECT_EQ(checksum(all.first(1000), 7), 0xd44bcfca0a9fcfa1u);
  EXPECT_EQ(checksum(all.first(262143), 0), 0xc9aa959b40cb3e7bu);
  EXPECT_EQ(checksum(all, 0x123456789abcdef0u), 0x34eadb0052e4095cu);
}

TEST(Checksum, SeesEveryByteAndTheSeed) {
  std::vector<std::byte> bytes = counting_bytes(4096);
  const uint64_t before = checksum(bytes, 1);
  EXPECT_NE(checksum(bytes, 2), before);
  for (size_t i = 0; i < bytes.size(); i += 37) {
    bytes[i] ^= std::byte{1};
    EXPECT_NE(checksum(bytes, 1), before) << i;
    bytes[i] ^= std::byte{1};
  }
}

TEST(MixSeed, OrderMatters) { EXPECT_NE(mix_seed(1, 2), mix_seed(2, 1)); }

}  // namespace
}  // namespace smartinf::base
