// Options of the engine and its devices that a user can set. The recipe's [engine], [optimizer] and
// [[device]] tables map to these one to one.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/compress/options.h"
#include "smartinf/csd/trace.h"
#include "smartinf/kernels/row_rules.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/plan/rank_span.h"
#include "smartinf/plan/schedule.h"
#include "smartinf/serve/options.h"
#include "smartinf/storage/row_file.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {
struct OpenClTraffic;  // opencl_processor.h
}

namespace smartinf::engine {

class Collectives;  // ranks/collectives.h
using serve::is_remote;

enum class UpdateWhere : uint8_t {
  kDevice,  // SmartUpdate: state stays behind the host link
  kHost,    // the baseline: state crosses the host link both ways
};
inline constexpr std::array<std::string_view, 2> kUpdateWhereNames{"device", "host"};
constexpr base::EnumNames enum_names(UpdateWhere) { return kUpdateWhereNames; }

/// A path with a rate in each direction, for emulation. Bytes per second; 0: as fast as it goes.
struct EmulatedLink {
  uint64_t up_bytes_per_s = 0;    // towards the host: reads of a drive, new weights
  uint64_t down_bytes_per_s = 0;  // away from it: writes, gradients
  bool shared_budget = false;     // both directions draw on one
  uint32_t latency_us = 0;        // of every transfer; costs no bandwidth
  bool given() const { return up_bytes_per_s > 0 || down_bytes_per_s > 0 || latency_us > 0; }
};

/// A device that no rank was named for: whoever knows how many there are shares them out.
inline constexpr uint32_t kAnyRank = ~uint32_t{0};

struct DeviceOptions {
  std::string path;             // directory or block device, or grpc://HOST:PORT/DEVICE
  std::string name;             // in messages; empty: the path
  uint32_t threads = 0;         // processor threads; 0: the cores shared out among the devices
  double bandwidth = 0;         // relative, for placement; 0: measured at first use
  uint64_t capacity_bytes = 0;  // 0: what is free
  uint64_t rated_endurance_bytes = 0;  // bytes written in the drive's rated life; 0: not known
  EmulatedLink internal_link;          // between store and processor
  uint32_t rank = 0;                   // the rank that drives it
  /// "cpu", or an OpenCL device (csd::parse_processor).
  std::string processor = "cpu";
  /// Counts what goes between this machine's memory and the processor's; null: not counted.
  /// shared_ptr: it is read beside the device and after it.
  std::shared_ptr<csd::OpenClTraffic> processor_traffic;
};

/// Whether DeviceOptions::processor can be understood. Errors: kInvalidArgument with what there is.
base::Status check_processor(const std::string& processor);

/// A table of which a step touches few rows (row_tables.h).
struct TableOptions {
  std::string name;
  uint64_t rows = 0;
  uint32_t dim = 0;
  storage::RowTableKind kind = storage::RowTableKind::kState;
  kernels::RowOptions rule;  // of a state table
  kernels::RowStart start;   // weights that are not put
};

struct UpdaterOptions {
  std::vector<DeviceOptions> devices;
  /// The ranks that share the run; null: this process alone. Every rank names the devices of all of
  /// them, in the same order, and drives its own (DeviceOptions::rank). Options are the same on all
  /// ranks, and budgets those of all ranks together.
  std::shared_ptr<Collectives> collectives;
  /// The ranks that compute with elements of the space, by spans that together are all of it: they
  /// alone have sums of its gradients and get its weights, and its state is placed on their devices
  /// where these have room for it. The gradient of an element of several spans is the sum of
  /// theirs, in this order. Empty: all ranks compute with all elements.
  std::vector<plan::RankSpan> stages;
  /// Ranks that each have a run of their own, over their part of what is trained, and make every
  /// step with this one: all open, initialize, edit, finish_gradients() and commit alike, and get
  /// the same errors of it; the norm is of all. Null, or a world of one: nobody. Not with
  /// `collectives`.
  std::shared_ptr<Collectives> peers;
  kernels::RuleOptions rule;
  base::StateFormat format = base::StateFormat::kF32;
  UpdateWhere where = UpdateWhere::kDevice;
  plan::ScheduleVariant schedule = plan::ScheduleVariant::kOverlapped;
  base::DataType gradient_type = base::DataType::kBf16;  // on the host link
  uint64_t seed = 0;                                     // of stochastic rounding
  compress::CompressOptions compress;
  uint64_t memory_budget_bytes = plan::kMemoryBudgetBytes;  // slots; gradients, weights on top
  /// Bytes of state that stay in memory as well and are read from the drives once; on top of the
  /// budget.
  uint64_t state_cache_bytes = 0;
  uint64_t gradient_budget_bytes = ~uint64_t{0};  // above it gradients are spilled
  /// A new run has room on the devices for all gradients, also where they fit: a later opening may
  /// have a smaller budget.
  bool gradient_room = false;
  uint64_t subgroup_elements = 0;  // 0: chosen from the budget
  /// Room on the devices for Updater::spool(), on all of them together; taken when they are opened.
  uint64_t spool_bytes = 0;
  /// Weights that have no place in memory are fetched from the devices (Updater::fetch_weights),
  /// which read them into slots of their own, out of the memory budget. Not with compression.
  bool stream_weights = false;
  std::vector<TableOptions> tables;
  /// Memory for where rows of tables are and for a cache of them, of all devices together.
  uint64_t table_memory_bytes = uint64_t{256} << 20;
  /// Room on the drives for rows on their way home, of all devices together; 0: chosen.
  uint64_t table_log_bytes = 0;
  storage::Durability durability = storage::Durability::kStep;
  bool checksums = true;
  storage::RingKind ring = storage::RingKind::kAuto;
  uint64_t io_bytes = 0;  // 0: measured at first use and remembered on the device
  uint32_t io_depth = 0;  // 0: likewise
  /// With several devices: each one's threads are kept on cores of their own, near its drive, where
  /// there are enough cores. For one process on the machine.
  bool pin_threads = true;
  bool create = true;  // false: only open what exists
  /// A device that owes an answer and for so long neither gives one nor moves a byte is an error,
  /// not waited for any longer. Beyond what a local drive's own watchdog takes to give up a request
  /// (five times StoreOptions::watchdog).
  std::chrono::nanoseconds device_silence_max = std::chrono::minutes(10);
  /// The step to recover to, which this run's devices have committed or prepared: what its peers
  /// have agreed on. None: the devices decide.
  std::optional<base::StepNumber> recover_to;
  EmulatedLink host_link;       // one for all devices
  serve::RemoteOptions remote;  // for devices of other machines
  /// Trace that records what devices and links do; null: nowhere. Read it when the updater is gone,
  /// or between a wait_commit() and the next step.
  std::shared_ptr<csd::Trace> trace;
};

}  // namespace smartinf::engine
