#include "smartinf/train/tensor_memory.h"

#include <cstdint>
#include <fstream>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/types.h>
#include <unistd.h>

namespace smartinf::train {
namespace {

constexpr int64_t kMiB = 1 << 20;

torch::Tensor bytes(int64_t count) { return torch::ones(count, torch::kUInt8); }

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t all = 0;
  int64_t resident = 0;
  statm >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

class TensorMemory : public testing::Test {
 protected:
  TensorMemory() { give_tensors_their_own_pages(); }
  ~TensorMemory() override { unmap_waiting_pages(); }
};

TEST_F(TensorMemory, LargeTensorsBeginOnHugePages) {
  for (const int64_t count : {kMiB, kMiB + 1, 2 * kMiB, 5 * kMiB - 3}) {
    const auto address = reinterpret_cast<uintptr_t>(bytes(count).const_data_ptr());
    EXPECT_EQ(address % (2 * kMiB), 0u) << count;
  }
  EXPECT_EQ(bytes(0).numel(), 0);
  EXPECT_EQ(bytes(100).sum().item<int64_t>(), 100);
}

TEST_F(TensorMemory, PagesWaitForTheNextTensorOfTheirSize) {
  const void* first = bytes(8 * kMiB).const_data_ptr();
  EXPECT_EQ(bytes(8 * kMiB).const_data_ptr(), first);
  // Another size needs them back.
  const torch::Tensor other = bytes(8 * kMiB - 5000);
  EXPECT_EQ(other.sum().item<int64_t>(), 8 * kMiB - 5000);
}

TEST_F(TensorMemory, PagesGivenUpForAnotherSizeAreItsOwn) {
  const void* first = bytes(8 * kMiB).const_data_ptr();
  const torch::Tensor shorter = bytes(5 * kMiB);
  EXPECT_EQ(shorter.const_data_ptr(), first);
  EXPECT_EQ(shorter.sum(torch::kInt64).item<int64_t>(), 5 * kMiB);
  EXPECT_NE(bytes(5 * kMiB).const_data_ptr(), first);
}

TEST_F(TensorMemory, IsNoMoreThanTensorsNeedAtOnce) {
  { const torch::Tensor warm = bytes(kMiB); }
  const int64_t before = resident_bytes();
  for (int64_t step = 0; step < 40; ++step) {
    const torch::Tensor large = bytes((64 + step) * kMiB);  // never the same size
    EXPECT_LT(resident_bytes() - before, (64 + step + 8) * kMiB);
  }
  unmap_waiting_pages();
  EXPECT_LT(resident_bytes() - before, 8 * kMiB);
}

TEST_F(TensorMemory, GrowsCopiesAndIsFreedByAddress) {
  torch::Tensor tensor = bytes(2 * kMiB);
  tensor.resize_({5 * kMiB});
  EXPECT_EQ(tensor.narrow(0, 0, 2 * kMiB).sum().item<int64_t>(), 2 * kMiB);
  EXPECT_TRUE(tensor.clone().equal(tensor));
  // Some of torch's products take and free memory by address.
  const torch::Tensor a = torch::ones({1024, 1024}, torch::kBFloat16);
  EXPECT_EQ(torch::mm(a, a)[3][5].item<double>(), 1024);
  c10::Allocator* allocator = c10::GetAllocator(c10::kCPU);
  for (const int64_t count : {int64_t{64}, 3 * kMiB}) {
    allocator->raw_deallocate(allocator->raw_allocate(static_cast<size_t>(count)));
  }
}

TEST_F(TensorMemory, SaysWhatDoesNotFit) {
  EXPECT_THROW(torch::empty({int64_t{1} << 50}, torch::kUInt8), c10::OutOfMemoryError);
  // Pages that were not given were not needed either.
  const int64_t before = resident_bytes();
  for (int64_t size = 32; size < 40; ++size) bytes(size * kMiB);
  EXPECT_LT(resident_bytes() - before, (39 + 8) * kMiB);
}

TEST_F(TensorMemory, ServesThreads) {
  std::vector<std::jthread> threads;
  for (int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int64_t i = 0; i < 200; ++i) {
        const torch::Tensor mine = torch::full(2 * kMiB + (i % 3) * 5000, t, torch::kUInt8);
        ASSERT_EQ(mine[i].item<int64_t>(), t);
        ASSERT_EQ(mine[-1].item<int64_t>(), t);
      }
    });
  }
}

}  // namespace
}  // namespace smartinf::train
