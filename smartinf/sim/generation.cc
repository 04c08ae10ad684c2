#include "smartinf/sim/generation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/kernels/attention.h"
#include "smartinf/plan/placement.h"
#include "smartinf/sim/generation_graph.h"

namespace smartinf::sim {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr uint64_t kCudaHostBytesAssumed = 1'500'000'000;
constexpr uint64_t kPrefillChunkTokens = 2048;  // of a prompt in one product

Status bad_options(std::string what, std::string advice) {
  return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
}

Status check_options(const ModelShape& model, const GenerationOptions& options) {
  if (options.context == 0 || options.sequences == 0 || options.tokens == 0) {
    return bad_options("a prompt, a sequence and a new token are needed",
                       "Give at least one of each.");
  }
  if (options.context + options.tokens > 100'000'000 || options.sequences > 10'000'000) {
    return bad_options("lengths beyond 1e8 tokens, or more than 1e7 sequences", "Give fewer.");
  }
  if (model.positions > 0 && options.context + options.tokens > model.positions) {
    return bad_options(fmt::format("{} + {} tokens are more than the {} positions of the model",
                                   options.context, options.tokens, model.positions),
                       "Give fewer.");
  }
  if (options.prefix > options.context) {
    return bad_options(fmt::format("a shared prefix of {} tokens in prompts of {}", options.prefix,
                                   options.context),
                       "The prefix is a part of the prompt.");
  }
  const auto share = [](double value) {
    return value == GenerationOptions::kAuto || (value >= 0 && value <= 1);
  };
  if (!share(options.inputs)) {
    return bad_options("a share is not from 0 to 1", "Give one, or auto.");
  }
  if (options.prefix > 0 && options.inputs != 0) {
    return bad_options("inputs of layers in place of keys and values, with a shared prefix",
                       "Leave out one of them.");
  }
  return {};
}

/// Whether keys and values in the host's memory have cores beside them, which the file knows.
Status check_memory(const Machine& machine, const GenerationOptions& options) {
  const bool cores = machine.gpu.name == "none" &&
                     std::ranges::all_of(machine.devices, &DeviceGroup::on_host_cores);
  const bool known = options.memory_bytes > 0 || machine.host.memory_bytes > 0;
  if (cores && known && options.inputs == 0 && !options.takes_turns() &&
      options.attention == AttentionPlace::kDevices) {
    return {};
  }
  return Status(ErrorCode::kUnsupported,
                "keys and values in memory are for cores that compute, as a file of `smartinf "
                "calibrate` has them, and not for the options of other systems",
                "Leave out --cache-in memory.");
}

uint64_t host_bytes_max(const Machine& machine, const GenerationOptions& options) {
  if (options.memory_bytes > 0) return options.memory_bytes;
  return machine.host.memory_bytes > 0 ? machine.host.memory_bytes : ~uint64_t{0};
}

uint64_t activation_bytes(const ModelShape& model, const GenerationOptions& options) {
  const uint64_t wide = model.hidden * 8 + model.feed_forward * 4 +
                        (model.heads * 3 + model.kv_heads * 2) * model.head_size;
  const uint64_t chunk = std::min(options.context, kPrefillChunkTokens);
  const uint64_t keys = 2 * model.kv_heads * model.head_size * options.context;  // of one layer
  return (chunk * wide + keys) * options.value_bytes() + 8 * options.sequences * model.vocabulary;
}

/// Of which each device gets its part.
Status place_cache(const Machine& machine, const GenerationOptions& options, GenerationNeed& need) {
  const CachePieces pieces = cache_pieces(need.cache, options);
  uint64_t room = 0;
  bool known = true;
  for (const DeviceGroup& group : machine.devices) {
    known = known && group.capacity_bytes > 0;
    room += group.count * (group.capacity_bytes / pieces.bytes);
  }
  if (known && room < pieces.count) {
    uint64_t capacity = 0;
    for (const DeviceGroup& group : machine.devices) capacity += group.count * group.capacity_bytes;
    return Status(
        ErrorCode::kNoSpace,
        fmt::format("keys and values of {} sequences are {}, {} each, and the devices have {}",
                    options.sequences, base::format_bytes(need.cache_bytes),
                    base::format_bytes(need.cache_bytes / options.sequences),
                    base::format_bytes(capacity)),
        fmt::format("Room is for {}. Give fewer or shorter sequences, more drives, or "
                    "--cache-format q8.",
                    room));
  }
  SI_ASSIGN_OR_RETURN(const std::vector<GroupLoad> loads, group_loads(pieces, machine));
  for (const GroupLoad& load : loads) {
    need.drive_bytes = std::max(need.drive_bytes, load.pieces * pieces.bytes);
  }
  return {};
}

const char* kept_name(const GenerationNeed& need) {
  return need.in_memory ? "keys and values" : "unfinished blocks";
}

Status check_room(const GenerationOptions& options, uint64_t limit, uint64_t most,
                  uint64_t wanted) {
  if (wanted <= most) return {};
  return Status(ErrorCode::kOutOfMemory,
                fmt::format("keys and values of {} sequences take {} of memory, and beside the "
                            "weights {} of {} may be taken",
                            options.sequences, base::format_bytes(wanted), base::format_bytes(most),
                            base::format_bytes(limit)),
                "Allow more memory, or give fewer sequences.");
}

double prefill_seconds(const ModelShape& model, const Machine& machine,
                       const GenerationOptions& options, const GenerationNeed& need) {
  const auto sequences = static_cast<double>(options.sequences);
  const auto context = static_cast<double>(options.context);
  const auto shared = static_cast<double>(options.prefix);
  const double tokens = shared + sequences * (context - shared);
  const double layers = static_cast<double>(model.layers);
  // A token sees those before it: of all pairs half.
  const double pairs = shared * shared / 2 + sequences * (context * context - shared * shared) / 2;
  const double flops = layers * (2 * model.active_parameters() * tokens +
                                 4 * static_cast<double>(model.heads * model.head_size) * pairs) +
                       2 * static_cast<double>(model.hidden * model.vocabulary) * sequences;
  const double compute_s = flops / (machine.gpu.peak_flops * machine.gpu.product_efficiency);
  double read_per_s = 0;
  double write_per_s = 0;
  for (const DeviceGroup& group : machine.devices) {
    const double link =
        std::min(group.link_bytes_per_s,
                 group.remote ? machine.network.bytes_per_s : machine.host.link_bytes_per_s);
    const double links = group.remote ? link : link * group.count;
    read_per_s += std::min(group.count * group.reads_only(), links);
    write_per_s +=
        std::min(group.count * group.write_bytes_per_s / group.write_amplification, links);
  }
  const plan::SequenceTraffic one = plan::sequence_traffic(need.cache, options.context, 0);
  const double written =
      need.in_memory ? 0 : tokens / context * static_cast<double>(one.prefill.written);
  const double weights = static_cast<double>(streamed_weight_bytes(model, options, need));
  return std::max({compute_s, written / write_per_s, weights / read_per_s});
}

Result<GenerationTimes> simulate_share(const ModelShape& model, const Machine& machine,
                                       const GenerationOptions& options) {
  SI_ASSIGN_OR_RETURN(const GenerationNeed need, generation_need(model, machine, options));
  SI_ASSIGN_OR_RETURN(GenerationTimes times, run_generation_step(model, machine, options, need));
  times.prefill_s = prefill_seconds(model, machine, options, need);
  times.inputs = options.inputs;
  times.in_memory = need.in_memory;
  return times;
}

/// What `make` makes of the options with keys and values in memory or on the devices, whichever
/// takes less time; in memory where they are alike, as where devices keep all of them in memory,
/// too. Errors: the devices'.
template <typename Make, typename Seconds>
auto at_better_place(GenerationOptions options, Make make, Seconds seconds) {
  options.cache = CachePlace::kMemory;
  auto in_memory = make(options);
  options.cache = CachePlace::kDevices;
  auto on_devices = make(options);
  if (!in_memory.ok()) return on_devices;
  return on_devices.ok() && seconds(*on_devices) < 0.99 * seconds(*in_memory) ? on_devices
                                                                              : in_memory;
}

/// Fits beside that many others?
bool fits(const ModelShape& model, const Machine& machine, GenerationOptions options,
          uint64_t sequences, Status& why) {
  options.sequences = sequences;
  const auto need = generation_need(model, machine, options);
  if (!need.ok()) why = need.status();
  return need.ok();
}

void add_wear(GenerationPlan& plan) {
  if (plan.need.in_memory) return;
  const GenerationOptions& options = plan.options;
  const plan::SequenceTraffic one =
      plan::sequence_traffic(plan.need.cache, options.context, options.tokens);
  const double shared = static_cast<double>(options.prefix) / static_cast<double>(options.context);
  const auto sequences = static_cast<double>(options.sequences);
  // Sequences kept as inputs write those in place of keys and values.
  const double inputs = plan.times.inputs;
  const double input_part =
      plan.options.inputs_in_memory
          ? 0
          : static_cast<double>(plan.model.hidden) /
                static_cast<double>(2 * plan.model.kv_heads * plan.model.head_size);
  const double kept = 1 - inputs + inputs * input_part;
  const double prompts = shared + sequences * (1 - shared);
  const double written = kept * (prompts * static_cast<double>(one.prefill.written) +
                                 sequences * static_cast<double>(one.decode.written));
  plan.written_bytes = static_cast<uint64_t>(written);
  plan.read_bytes = static_cast<uint64_t>(sequences * static_cast<double>(options.tokens) /
                                          static_cast<double>(plan.together) *
                                          static_cast<double>(plan.times.traffic.read));
  GenerationOptions together = options;
  together.sequences = plan.together;
  const CachePieces pieces = cache_pieces(plan.need.cache, together);
  const auto loads = group_loads(pieces, plan.machine);
  if (!loads.ok()) return;
  double worn = 0;  // share of the life of the drive that wears fastest, for the whole job
  for (const GroupLoad& load : *loads) {
    if (load.group->endurance_bytes == 0 || load.pieces == 0) continue;
    const double part = static_cast<double>(load.pieces) / static_cast<double>(pieces.count);
    worn = std::max(worn, written * part * load.group->write_amplification /
                              static_cast<double>(load.group->endurance_bytes));
  }
  if (worn <= 0) return;
  plan.requests_until_worn = sequences / worn;
  plan.tokens_until_worn =
      plan.requests_until_worn * static_cast<double>(options.context + options.tokens);
  plan.life_days = (plan.prefill_s + plan.decode_s) / worn / 86400;
}

/// Whether it is a part of each device, of which more devices have more.
bool of_devices(std::string_view resource) {
  return resource == "drives" || resource == "device processors" || resource == "device links";
}

/// How many drives of the first kind make something that is not theirs the limit. Fewer than there
/// are, where they do not limit now.
void add_next_limit(GenerationPlan& plan, const GenerationOptions& together) {
  constexpr uint32_t kDrivesMax = 1024;
  if (plan.need.in_memory) return;
  Machine more = plan.machine;
  for (uint32_t n = 1; n <= kDrivesMax; n += std::max(1u, n / 16)) {
    more.devices.front().count = n;
    const auto times = simulate_generation(plan.model, more, together);
    if (!times.ok()) continue;  // too few for all keys and values
    if (of_devices(times->bound_by)) continue;
    plan.drives = n;
    plan.next_bound = times->bound_by;
    plan.next_tokens_per_s = times->tokens_per_s;
    return;
  }
}

}  // namespace

Result<plan::CacheModel> cache_model(const ModelShape& model, kernels::CacheFormat format) {
  const bool attends = !model.counts || std::ranges::all_of(model.counts->layers,
                                                            [](const model::LayerCount& layer) {
                                                              return layer.attends;
                                                            });
  if (!attends || model.vocabulary == 0 || model.heads == 0 || model.kv_heads == 0 ||
      model.type == "bert" || model.type == "t5") {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("{} is not a decoder with attention in every layer", model.name),
                  "Generation keeps keys and values of such models.");
  }
  plan::CacheModel cache;
  cache.layers = static_cast<uint32_t>(model.layers);
  cache.heads = static_cast<uint32_t>(model.heads);
  cache.kv_heads = static_cast<uint32_t>(model.kv_heads);
  cache.head_width = static_cast<uint32_t>(model.head_size);
  if (model.architecture) cache.windows = model.architecture->windows;
  if (cache.windows.size() != cache.layers) cache.windows.clear();
  cache.block_tokens = kernels::kCacheBlockTokens;
  cache.block_bytes = kernels::cache_block_bytes({cache.kv_heads, cache.head_width, format});
  return cache;
}

Result<GenerationNeed> generation_need(const ModelShape& model, const Machine& machine,
                                       const GenerationOptions& options) {
  SI_RETURN_IF_ERROR(check_model(model));
  SI_RETURN_IF_ERROR(check_machine(machine));
  SI_RETURN_IF_ERROR(check_options(model, options));
  GenerationNeed need;
  SI_ASSIGN_OR_RETURN(need.cache, cache_model(model, options.format));
  const uint64_t longest = options.context + options.tokens;
  need.in_memory = options.cache == CachePlace::kMemory;
  if (need.in_memory) {
    SI_RETURN_IF_ERROR(check_memory(machine, options));
    need.cache_bytes = options.sequences * plan::memory_bytes(need.cache, longest);
  } else {
    const CachePieces pieces = cache_pieces(need.cache, options);
    need.cache_bytes = pieces.count * pieces.bytes;
    SI_RETURN_IF_ERROR(place_cache(machine, options, need));
  }

  const bool gpu = machine.gpu.name != "none";
  const uint64_t limit = host_bytes_max(machine, options);
  // Beside devices: the block of each layer that is not whole.
  const uint64_t kept =
      need.in_memory ? need.cache_bytes : options.sequences * plan::tail_bytes(need.cache);
  const uint64_t states = options.sequences * need.cache.heads * (need.cache.head_width + 2) * 8;
  plan::InferenceMemoryInput input;
  input.units = model.units();
  input.value_bytes = options.value_bytes();
  input.activation_bytes = activation_bytes(model, options);
  input.gpu = gpu;
  input.source_bytes = states;
  input.process_bytes =
      machine.host.process_bytes != 0 ? machine.host.process_bytes : plan::kTorchBytes;
  if (gpu) input.process_bytes += plan::kTorchGpuBytes + kCudaHostBytesAssumed;
  const uint64_t weights = input.value_bytes * input.units.back().end();
  const uint64_t room = plan::key_value_room(limit, input.process_bytes + weights);
  const uint64_t devices = machine.device_count();
  need.slot_bytes =
      gpu ? kCacheSlotBytes
          : plan::key_value_device_bytes(room, devices, need.cache.block_bytes, kCacheSlotBytes);
  if (!need.in_memory) input.source_bytes += need.slot_bytes * devices;
  input.host_limit_bytes = limit - std::min(limit, kept);
  // Other systems bring the weights of each layer by itself.
  if (gpu && machine.gpu.memory_bytes > 0 && !options.takes_turns()) {
    input.accelerator_limit_bytes = machine.gpu.memory_bytes;
  }
  const auto placed = plan::plan_inference(input);
  if (!placed.ok()) {
    const Status& status = placed.status();
    return Status(status.code(),
                  fmt::format("{}; beside {} for the {} of {} sequences", status.what(),
                              base::format_bytes(kept), kept_name(need), options.sequences),
                  "Allow more memory, or give fewer sequences.");
  }
  if (!gpu) SI_RETURN_IF_ERROR(check_room(options, limit, room, input.source_bytes + kept));
  need.placement = placed->placement;
  need.gpu_bytes = placed->memory.accelerator_bytes;
  need.gpu_parts = placed->memory.accelerator;
  need.host_parts = placed->memory.host;
  need.host_parts.push_back({kept_name(need), kept});
  need.host_bytes = placed->memory.host_bytes + kept;
  // A device keeps some where it has all memory for reading and writing.
  if (!need.in_memory && need.slot_bytes == kCacheSlotBytes &&
      check_memory(machine, options).ok()) {
    // Of what nobody has asked for, smartinf generate leaves half to others.
    const uint64_t left = (limit - need.host_bytes) / (options.memory_bytes > 0 ? 1 : 2);
    need.kept_bytes = std::min(left, need.cache_bytes);
    need.host_parts.push_back({"keys and values that are on drives, too", need.kept_bytes});
    need.host_bytes += need.kept_bytes;
  }
  return need;
}

Result<GenerationTimes> simulate_generation(const ModelShape& model, const Machine& machine,
                                            const GenerationOptions& options) {
  if (options.cache == CachePlace::kAuto) {
    return at_better_place(
        options,
        [&](const GenerationOptions& placed) {
          return simulate_generation(model, machine, placed);
        },
        [](const GenerationTimes& times) { return times.step_s; });
  }
  if (options.inputs != GenerationOptions::kAuto) return simulate_share(model, machine, options);
  // A step has one shortest share: the nearest of some, then nearer ones on both sides.
  constexpr int kShares = 40;
  GenerationOptions tried = options;
  Result<GenerationTimes> best = Status(ErrorCode::kInvalidArgument, "no share was tried");
  int best_at = 0;
  const auto attempt = [&](int at) -> Status {
    if (at < 0 || at > kShares) return {};
    tried.inputs = static_cast<double>(at) / kShares;
    SI_ASSIGN_OR_RETURN(GenerationTimes times, simulate_share(model, machine, tried));
    if (best.ok() && times.step_s >= best->step_s) return {};
    best = std::move(times);
    best_at = at;
    return {};
  };
  for (int at = 0; at <= kShares; at += 8) SI_RETURN_IF_ERROR(attempt(at));
  for (const int apart : {4, 2, 1}) {
    const int middle = best_at;
    SI_RETURN_IF_ERROR(attempt(middle - apart));
    SI_RETURN_IF_ERROR(attempt(middle + apart));
  }
  return best;
}

Result<GenerationPlan> plan_generation(const ModelShape& model, const Machine& machine,
                                       const GenerationOptions& options) {
  if (options.cache == CachePlace::kAuto) {
    return at_better_place(
        options,
        [&](const GenerationOptions& placed) { return plan_generation(model, machine, placed); },
        [](const GenerationPlan& made) { return made.prefill_s + made.decode_s; });
  }
  GenerationPlan plan;
  plan.model = model;
  plan.machine = machine;
  plan.options = options;
  Status why;
  if (!fits(model, machine, options, 1, why)) return why;
  uint64_t low = 1;
  uint64_t high = options.sequences + 1;
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    (fits(model, machine, options, middle, why) ? low : high) = middle;
  }
  plan.together = low;
  if (low < options.sequences) {
    plan.held_by = why.code() == ErrorCode::kNoSpace ? "drives" : "memory";
  }
  GenerationOptions together = options;
  together.sequences = low;
  SI_ASSIGN_OR_RETURN(plan.times, simulate_generation(model, machine, together));
  together.inputs = plan.times.inputs;
  SI_ASSIGN_OR_RETURN(plan.need, generation_need(model, machine, together));
  const auto all = static_cast<double>(options.sequences);
  plan.prefill_s = plan.times.prefill_s * all / static_cast<double>(low);
  plan.decode_s = all * static_cast<double>(options.tokens) / plan.times.tokens_per_s;
  add_wear(plan);
  add_next_limit(plan, together);
  return plan;
}

}  // namespace smartinf::sim
