// Cost of the store: checksums alone, and a whole state moved through it.
//   SMARTINF_BENCH_DIR=/mnt/nvme store_bench
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/store.h"
#include "smartinf/storage/tuning.h"

namespace smartinf::storage {
namespace {

void BM_BlockChecksum(benchmark::State& state) {
  const auto buffer = base::AlignedBuffer::allocate(static_cast<uint64_t>(state.range(0)));
  const uint64_t seed = device_seed(make_run_id(), 0);
  BlockIdentity identity{1, 0, 0, 1, 7};
  for (auto _ : state) {
    ++identity.block;
    benchmark::DoNotOptimize(block_checksum(buffer->bytes(), seed, identity));
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * state.range(0));
}
BENCHMARK(BM_BlockChecksum)->Arg(128 << 10)->Arg(256 << 10)->Arg(64 << 20);

/// One step's bytes through the store, nothing computed: args are io_bytes and io_depth.
void BM_DriveLimit(benchmark::State& state) {
  const char* directory = std::getenv("SMARTINF_BENCH_DIR");
  if (directory == nullptr) {
    state.SkipWithError("set SMARTINF_BENCH_DIR to a directory on the drive to measure");
    return;
  }
  const std::string path = (std::filesystem::path(directory) / "smartinf-bench").string();
  StoreLayout layout;
  layout.run = make_run_id();
  layout.planes = {base::PlaneKind::kMaster, base::PlaneKind::kMomentum,
                   base::PlaneKind::kVariance};
  constexpr uint64_t kElements = uint64_t{1} << 22;
  constexpr uint32_t kSubgroups = 24;
  for (uint32_t i = 0; i < kSubgroups; ++i) {
    layout.subgroups.push_back({base::SubgroupId{i}, i * kElements, kElements});
  }
  StoreOptions options;
  options.checksums = false;
  options.io_bytes = static_cast<uint64_t>(state.range(0));
  options.io_depth = static_cast<uint32_t>(state.range(1));
  {
    auto store = Store::create(path, layout, options);
    if (!store.ok()) {
      state.SkipWithError(store.status().to_string().c_str());
      return;
    }
    const auto buffer = base::AlignedBuffer::allocate((*store)->extent_bytes_max());
    // Both slots, so that no extent is written for the first time while measuring.
    for (base::StepNumber step = 0; step < 2; ++step) {
      (*store)->begin_step(step);
      for (const StoredSubgroup& subgroup : layout.subgroups) {
        SubgroupIo io;
        io.op = SubgroupIo::Op::kWrite;
        io.subgroup = subgroup.id;
        io.buffer = buffer->bytes();
        (*store)->start(io);
        SubgroupIo* done = nullptr;
        (void)(*store)->poll({&done, 1}, std::chrono::seconds(60));
      }
      if (!(*store)->prepare(step, "").ok() || !(*store)->commit(step).ok()) {
        state.SkipWithError("the state could not be written");
        return;
      }
    }
  }
  uint64_t bytes = 0;
  for (auto _ : state) {
    const auto limit = drive_limit(path, options, 512 * base::kMiB);
    if (!limit.ok()) {
      state.SkipWithError(limit.status().to_string().c_str());
      break;
    }
    state.SetIterationTime(limit->seconds);
    bytes += limit->read_bytes + limit->written_bytes;
  }
  state.SetBytesProcessed(static_cast<int64_t>(bytes));
  std::filesystem::remove_all(path);
}
BENCHMARK(BM_DriveLimit)
    ->ArgsProduct({{1 << 20, 4 << 20}, {4, 8, 16}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->MinTime(3);

}  // namespace
}  // namespace smartinf::storage
