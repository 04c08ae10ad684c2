// How a local device is built. The engine fills this in from a user's options and measurements.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/csd/link.h"
#include "smartinf/csd/processor.h"
#include "smartinf/csd/trace.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/schedule.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

/// Where the path to host memory runs, for counting: SmartUpdate or host update.
enum class HostLinkPlace : uint8_t {
  kAtProcessor,  // gradients go down and weights come up
  kAtStore,      // the processor is the host: all the store's traffic crosses
};

/// Emulated paths; none by default. shared_ptr, because several devices and whoever reads the
/// counters hold one link.
struct DeviceLinks {
  /// Between store and processor; every transfer of the store passes all of them at once.
  std::vector<std::shared_ptr<Link>> store;
  /// Between processor and host: gradients down, new weights up.
  std::shared_ptr<Link> host;
};

struct LocalDeviceOptions {
  std::string path;  // directory or block device
  std::string name;  // in messages; empty: the path
  const std::string& device_name() const { return name.empty() ? path : name; }

  uint32_t threads = 1;  // of the processor
  /// Thread i is kept on cores[i % cores.size()]; empty: the system puts it where it likes.
  std::vector<uint32_t> cores;

  /// Slots, and their gradient buffers when gradients are spilled.
  uint64_t memory_bytes = plan::kMemoryBudgetBytes;
  uint32_t slots = 0;  // 0: plan::device_slots chooses
  /// Weights that ReadWeights reads at once, each with memory for a subgroup's master plane, out of
  /// memory_bytes. 0: ReadWeights is refused.
  uint32_t weight_read_slots = 0;

  /// Gradients that stay in memory; those beyond are spilled to the store's spill area, for which
  /// the layout must have reserved space (gradient_spill_bytes).
  uint64_t gradient_budget_bytes = ~uint64_t{0};
  base::DataType gradient_type = base::DataType::kBf16;  // as the device stores them
  /// Above 0: gradients come compressed, with at most so many bytes for a block of a subgroup and
  /// its directory entry. They are kept as they come and expanded block by block at the processor.
  uint64_t compressed_block_bytes = 0;
  /// With that: how the parameter space lies in rows and columns, for messages with factors of the
  /// gradient's second moment and for samples of the variance. Empty: neither comes nor is wanted.
  std::vector<compress::MatrixLayout> matrices;

  /// Null: threads of this machine, as above (CpuProcessor).
  ProcessorFactory make_processor;

  plan::ScheduleVariant schedule = plan::ScheduleVariant::kOverlapped;
  storage::StoreOptions store;  // ring, durability, checksums, transfer size and depth, watchdog

  /// Memory for reading keys and values and for those that are not written yet (messages/cache),
  /// and room for them on the drive. 0: the device keeps none.
  uint64_t cache_memory_bytes = 0;
  uint64_t cache_bytes = ~uint64_t{0};
  /// Memory for tables (messages/rows): where their rows are, and a cache of rows. 0: the device
  /// keeps none.
  uint64_t row_memory_bytes = 0;
  /// Opens the place of a file beside the state (storage::kCacheFileName, kRowFileName), new or as
  /// it is. Null: in the directory `path`.
  std::function<base::Result<storage::CachePlace>(std::string_view name,
                                                  const storage::StoreOptions& options)>
      open_cache_place;

  /// The group of every element: spans in order, without gaps. Empty: group 0 everywhere.
  std::vector<plan::GroupSpan> groups;

  HostLinkPlace host_link_place = HostLinkPlace::kAtProcessor;
  DeviceLinks links;
  std::shared_ptr<Trace> trace;  // null: not recorded. Shared with the app that writes it.
};

}  // namespace smartinf::csd
