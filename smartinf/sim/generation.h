// Generation of many texts whose keys and values are on devices: what it needs of a machine, and a
// decode step on the virtual clock, in the order of plan/decode_schedule.h. Prompts (prefill) and
// decode are timed apart.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/status.h"
#include "smartinf/kernels/attention_kernels.h"
#include "smartinf/plan/cache_traffic.h"
#include "smartinf/plan/decode_schedule.h"
#include "smartinf/plan/inference_memory.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/model_shape.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// Where keys and values are. kAuto: where a step is shorter.
enum class CachePlace : uint8_t { kAuto, kMemory, kDevices };
inline constexpr std::array<std::string_view, 3> kCachePlaceNames{"auto", "memory", "devices"};
constexpr base::EnumNames enum_names(CachePlace) { return kCachePlaceNames; }

/// kHost: keys and values are fetched in every step, as in FlexGen.
enum class AttentionPlace : uint8_t { kDevices, kHost };
inline constexpr std::array<std::string_view, 2> kAttentionPlaceNames{"devices", "host"};
constexpr base::EnumNames enum_names(AttentionPlace) { return kAttentionPlaceNames; }

struct GenerationOptions {
  static constexpr double kAuto = -1;

  uint64_t context = 8192;  // tokens of a prompt
  uint64_t sequences = 16;  // decoded together; of plan_generation: of the whole job
  uint64_t tokens = 128;    // new ones of each
  uint64_t prefix = 0;      // first tokens of the prompts, which all of them share
  kernels::CacheFormat format = kernels::CacheFormat::kBf16;
  uint64_t memory_bytes = 0;  // of the host, that may be used; 0: all of the machine's
  CachePlace cache = CachePlace::kAuto;

  // Systems that smartinf is compared with.
  AttentionPlace attention = AttentionPlace::kDevices;
  plan::InTurn in_turn = plan::InTurn::kNothing;  // not kNothing: in every step all weights come
                                                  // to the GPU
  uint32_t write_back = 0;  // tokens after which keys and values are written head by head, each as
                            // a command; meanwhile the host has them. 0: whole blocks
  double inputs = 0;        // share of the sequences that are kept as inputs of layers (X-cache);
                            // kAuto: the share with the shortest step
  bool inputs_in_memory = false;  // those; else they are on the devices

  bool takes_turns() const { return in_turn != plan::InTurn::kNothing; }
  uint32_t value_bytes() const { return format == kernels::CacheFormat::kF32 ? 4 : 2; }
};

/// Its part of a machine.
struct GenerationNeed {
  plan::CacheModel cache;
  plan::UnitPlacement placement;  // of model.units()
  uint64_t host_bytes = 0;
  uint64_t gpu_bytes = 0;  // 0 without
  std::vector<plan::MemoryPart> host_parts;
  std::vector<plan::MemoryPart> gpu_parts;
  bool in_memory = false;    // keys and values; else they are on the devices
  uint64_t cache_bytes = 0;  // of all sequences at their longest
  uint64_t drive_bytes = 0;  // of the device that has most
  uint64_t slot_bytes = 0;   // memory of each device for reading and writing
  uint64_t kept_bytes = 0;   // of cache_bytes that the devices' memory has, too
};

struct GenerationTimes {
  double prefill_s = 0;  // of all sequences decoded together
  double step_s = 0;     // in the middle of the answers
  double tokens_per_s = 0;
  plan::CacheTraffic traffic;     // of a step, in the mean
  uint64_t weights_read = 0;      // of a step, at the drives
  double inputs = 0;              // the share that was taken
  bool in_memory = false;         // keys and values
  std::vector<Utilization> busy;  // in a step, most first
  std::string bound_by;           // "drives", "cores", "GPU", "device processors", "host link", ...
  size_t events = 0;
};

/// The cache of a model's attention in a format. Errors: kUnsupported for a model that is not a
/// decoder with attention in every layer.
base::Result<plan::CacheModel> cache_model(const ModelShape& model, kernels::CacheFormat format);

/// For options.sequences together; options.cache is kMemory or kDevices. Errors: cache_model's;
/// kInvalidArgument for lengths or shares that cannot be; kOutOfMemory and kNoSpace with what is
/// needed and what there is; kUnsupported for memory that nothing near it attends to.
base::Result<GenerationNeed> generation_need(const ModelShape& model, const Machine& machine,
                                             const GenerationOptions& options);

/// Errors: generation_need's; kUnsupported for a device that cannot attend.
base::Result<GenerationTimes> simulate_generation(const ModelShape& model, const Machine& machine,
                                                  const GenerationOptions& options);

struct GenerationPlan {
  ModelShape model;
  Machine machine;
  GenerationOptions options;  // sequences: of the whole job
  uint64_t together = 0;      // of them that are decoded together, as many as fit
  std::string held_by;        // what holds more of them: "drives", "memory"; empty: all fit
  GenerationNeed need;        // of those
  GenerationTimes times;
  double prefill_s = 0;  // of the whole job
  double decode_s = 0;
  uint64_t read_bytes = 0;  // of the whole job, at the drives; without weights
  uint64_t written_bytes = 0;
  double requests_until_worn = 0;  // of the drive that wears fastest; 0: endurance not known
  double tokens_until_worn = 0;    // prompts included
  double life_days = 0;            // at this pace, day and night
  // Drives of the first kind: from so many on something else limits, and as much is made.
  uint32_t drives = 0;  // 0: in memory, or with any number the devices limit
  std::string next_bound;
  double next_tokens_per_s = 0;
};
/// Errors: as simulate_generation for a single sequence.
base::Result<GenerationPlan> plan_generation(const ModelShape& model, const Machine& machine,
                                             const GenerationOptions& options);

}  // namespace smartinf::sim
