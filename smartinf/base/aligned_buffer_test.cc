#include "smartinf/base/aligned_buffer.h"

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

TEST(AlignedBuffer, IsAlignedZeroedAndMovable) {
  auto buffer = AlignedBuffer::allocate(5000);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 4096, 0u);
  EXPECT_EQ(buffer->size(), 8192u);
  for (const std::byte b : buffer->bytes()) ASSERT_EQ(b, std::byte{0});
  std::byte* data = buffer->data();
  AlignedBuffer moved = std::move(*buffer);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(buffer->data(), nullptr);
}

TEST(AlignedBuffer, BeginsWhereItIsToldTo) {
  for (const uint64_t bytes : {uint64_t{1}, kPageBytes, kHugePageBytes, 3 * kHugePageBytes + 1}) {
    auto buffer = AlignedBuffer::allocate(bytes, kHugePageBytes);
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % kHugePageBytes, 0u);
    buffer->bytes().front() = buffer->bytes().back() = std::byte{1};
  }
}

TEST(AlignedBuffer, TooMuchIsAStatusThatNamesTheSize) {
  const auto buffer = AlignedBuffer::allocate(uint64_t{1} << 60);
  ASSERT_FALSE(buffer.ok());
  EXPECT_EQ(buffer.status().code(), ErrorCode::kOutOfMemory);
  EXPECT_NE(buffer.status().to_string().find("PiB"), std::string::npos);
}

TEST(AlignedBuffer, ResizesWhereItIs) {
  auto made = AlignedBuffer::allocate(3 * kHugePageBytes, kHugePageBytes);
  ASSERT_TRUE(made.ok());
  std::byte* const data = made->data();
  data[5] = std::byte{7};
  ASSERT_TRUE(made->resize(kPageBytes + 1));
  EXPECT_EQ(made->size(), 2 * kPageBytes);
  EXPECT_EQ(made->data(), data);
  EXPECT_EQ(data[5], std::byte{7});
  // Nothing lies behind it now but what it had before, unless another thread has mapped that.
  if (made->resize(2 * kHugePageBytes)) {
    EXPECT_EQ(made->size(), 2 * kHugePageBytes);
    EXPECT_EQ(data[made->size() - 1], std::byte{0});
  }
  EXPECT_EQ(data[5], std::byte{7});
  EXPECT_FALSE(made->resize(0));
  EXPECT_FALSE(AlignedBuffer().resize(kPageBytes));
}

}  // namespace
}  // namespace smartinf::base
