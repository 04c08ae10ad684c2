#include "smartinf/sim/generation_graph.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/kernels/attention.h"
#include "smartinf/plan/placement.h"
#include "smartinf/sim/event_graph.h"

namespace smartinf::sim {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using plan::DecodeTask;
using plan::DecodeWork;

constexpr uint64_t kPiecesMax = 8;     // that reads and folds of a half and layer are cut into
constexpr double kRowsOfAPass = 16;   // of kernels/row_product over the weights
// Norms, rotations, activations, roundings and the choice of tokens beside the products of a step
// on cores, as a profile has them (docs/results/generate.md).
constexpr double kBesideProducts = 1.25;
// On cores the time of a byte's fold grows with the queries that share it from so many on; until
// then memory is the limit (docs/results/attention.md). device.fold_bytes_per_s is of 4 in bf16.
constexpr double kFoldQueriesFree = 5;

double per_byte(double bytes_per_s) { return 1 / bytes_per_s; }

/// Bytes a second of keys and values that a device's processor folds, or all cores where it is
/// those; 0: it cannot.
double fold_rate(const DeviceGroup& group) {
  if (group.fold_bytes_per_s > 0) return group.fold_bytes_per_s;
  // An update reads as much and writes as well, so a fold is not slower; kernels keep up with
  // reads.
  if (group.kernel.clock_hz > 0) return group.reads_only();
  return group.update_bytes_per_s;
}

/// By layer, whether its weights come from the devices, and whether they are on the GPU.
struct LayerPlaces {
  std::vector<bool> streamed;
  std::vector<bool> on_gpu;
};

LayerPlaces places_of(const ModelShape& model, const GenerationOptions& options,
                      const GenerationNeed& need) {
  LayerPlaces places;
  const std::vector<plan::Unit> units = model.units();
  for (uint32_t u = 0; u < units.size(); ++u) {
    for (uint32_t i = 0; i < units[u].layers; ++i) {
      places.streamed.push_back(u >= need.placement.in_memory);
      places.on_gpu.push_back(!options.takes_turns() && u < need.placement.on_accelerator);
    }
  }
  places.streamed.resize(model.layers, false);
  places.on_gpu.resize(model.layers, false);
  return places;
}

/// Builds the graph of the schedule's tasks, and runs it.
class GenerationGraph {
 public:
  GenerationGraph(const ModelShape& model, const Machine& machine, const GenerationOptions& options,
                  const GenerationNeed& need, std::vector<GroupLoad> loads, uint64_t pieces)
      : model_(model),
        machine_(machine),
        options_(options),
        need_(need),
        loads_(std::move(loads)),
        pieces_(pieces),
        places_(places_of(model, options, need)),
        gpu_(machine.gpu.name != "none") {
    const bool one_half = need.in_memory || options.takes_turns() || options.prefix > 0;
    halves_ = one_half || options.sequences == 1 ? 1 : 2;
    // In the middle of the answers, in the mean over the tokens of a block.
    middle_ = options.context + options.tokens / 2;
    step_ = mean_step();
    read_of_layer_.resize(need.cache.layers);
    double blocks = 0;
    for (uint32_t l = 0; l < need.cache.layers; ++l) {
      read_of_layer_[l] = static_cast<double>(plan::blocks_read(need.cache, l, middle_));
      blocks += read_of_layer_[l];
    }
    const double all = static_cast<double>(step_.read) * (1 - options.inputs);
    for (double& read : read_of_layer_) read = blocks > 0 ? all * read / blocks : 0;
    if (step_.read > 0) {
      read_share_ -=
          std::min(1.0, static_cast<double>(need.kept_bytes) / static_cast<double>(step_.read));
    }
    make_resources();
  }

  GenerationTimes run() {
    plan::DecodeScheduleInput input;
    input.layers = need_.cache.layers;
    input.halves = halves_;
    input.devices = static_cast<uint32_t>(loads_.size());
    input.steps = 2;
    input.streamed = places_.streamed;
    input.in_turn = options_.in_turn;
    schedule_ = plan::make_decode_schedule(input);
    std::array<std::vector<uint32_t>, 2> ends;
    for (const DecodeTask& task : schedule_) {
      add(task);
      if (task.work == DecodeWork::kLogits) ends[task.step].push_back(done_.back());
    }
    graph_.run();
    std::array<double, 2> end_s{};
    for (size_t step = 0; step < 2; ++step) {
      for (const uint32_t task : ends[step]) {
        end_s[step] = std::max(end_s[step], graph_.times(task).end_s);
      }
    }
    return times_between(end_s[0], end_s[1]);
  }

 private:
  double sequences() const { return static_cast<double>(options_.sequences); }
  double value_bytes() const { return options_.value_bytes(); }
  double hidden() const { return static_cast<double>(model_.hidden); }
  bool fetches() const { return options_.attention == AttentionPlace::kHost; }

  double rows(uint32_t half) const {
    if (halves_ == 1) return sequences();
    return std::floor((sequences() + (half == 0 ? 1 : 0)) / 2);
  }

  plan::CacheTraffic mean_step() const {
    const uint64_t tokens = need_.cache.block_tokens;
    const uint64_t first = middle_ / tokens * tokens;
    const auto sum = [&](size_t together) {
      plan::CacheTraffic all;
      for (uint64_t i = 0; i < tokens; ++i) {
        const uint64_t prefix = need_.in_memory ? 0 : options_.prefix;
        const std::vector<plan::CachedSequence> sequences(together, {first + i, prefix, 1});
        all += plan::step_traffic(need_.cache, sequences);
      }
      return all;
    };
    // Every sequence but the first adds as much.
    const plan::CacheTraffic one = sum(1);
    const plan::CacheTraffic two = sum(2);
    const auto of_all = [&](uint64_t a, uint64_t b) {
      return (a + (options_.sequences - 1) * (b - a)) / tokens;
    };
    return {of_all(one.read, two.read), of_all(one.written, two.written),
            of_all(one.link_down, two.link_down), of_all(one.link_up, two.link_up)};
  }

  void make_resources() {
    host_ = graph_.add_resource(gpu_ ? "GPU" : "cores");
    host_down_ = graph_.add_resource("host link");
    host_up_ = graph_.add_resource("host link");
    gpu_down_ = graph_.add_resource("GPU link");
    gpu_up_ = graph_.add_resource("GPU link");
    copy_ = graph_.add_resource("host copies");
    net_out_ = graph_.add_resource("network");
    net_in_ = graph_.add_resource("network");
    for (const GroupLoad& load : loads_) {
      const DeviceGroup& device = *load.group;
      Group group;
      group.count = need_.in_memory ? 1 : device.count;
      group.share = static_cast<double>(load.pieces * group.count) / static_cast<double>(pieces_);
      group.first_half = halves_ == 1 || load.pieces == 0 ? 1
                                                          : static_cast<double>(load.first_half) /
                                                                static_cast<double>(load.pieces);
      group.drive = graph_.add_resource("drives", device.mixed_efficiency);
      const bool shares_cores = device.on_host_cores && !gpu_;
      group.processor = shares_cores ? host_ : graph_.add_resource("device processors");
      group.down = graph_.add_resource("device links");
      group.up = graph_.add_resource("device links");
      groups_.push_back(group);
      // Products and folds share the cores by time.
      if (shares_cores && !fetches()) {
        compute_unit_s_ =
            folding(static_cast<uint32_t>(groups_.size() - 1)).front().seconds_per_byte;
      }
    }
  }

  const DeviceGroup& device(uint32_t g) const { return *loads_[g].group; }

  /// Rate of all devices of a group.
  double together(uint32_t g, double rate) const { return rate * groups_[g].count; }
  double link_rate(uint32_t g) const {
    // A server's interface is of all its drives.
    return device(g).remote ? device(g).link_bytes_per_s : together(g, device(g).link_bytes_per_s);
  }

  void use_link_up(uint32_t g, std::vector<Use>& uses) const {
    uses.push_back({groups_[g].up, per_byte(link_rate(g))});
    uses.push_back(device(g).remote ? Use{net_in_, per_byte(machine_.network.bytes_per_s)}
                                    : Use{host_up_, per_byte(machine_.host.link_bytes_per_s)});
  }
  void use_link_down(uint32_t g, std::vector<Use>& uses) const {
    uses.push_back({groups_[g].down, per_byte(link_rate(g))});
    uses.push_back(device(g).remote ? Use{net_out_, per_byte(machine_.network.bytes_per_s)}
                                    : Use{host_down_, per_byte(machine_.host.link_bytes_per_s)});
  }
  double latency_s(uint32_t g) const {
    return device(g).latency_s + (device(g).remote ? machine_.network.latency_s : 0);
  }

  std::vector<Use> reading(uint32_t g) const {
    const DeviceGroup& from = device(g);
    std::vector<Use> uses{
        {groups_[g].drive, per_byte(together(g, from.reads_only())), Direction::kRead}};
    if (from.on_host_cores && !gpu_ && from.cores_bytes_per_s > 0) {
      uses.push_back({host_, per_byte(from.cores_bytes_per_s)});
    }
    return uses;
  }
  std::vector<Use> fetching(uint32_t g) const {
    std::vector<Use> uses = reading(g);
    use_link_up(g, uses);
    uses.push_back({copy_, per_byte(machine_.host.copy_bytes_per_s)});
    if (gpu_) uses.push_back({gpu_down_, per_byte(machine_.gpu.link_bytes_per_s)});
    return uses;
  }
  std::vector<Use> folding(uint32_t g) const {
    double rate = fold_rate(device(g));
    const bool q8 = options_.format == kernels::CacheFormat::kQ8;
    if (q8) {  // a token takes as long as in bf16
      const kernels::CacheBlockShape bf16{need_.cache.kv_heads, need_.cache.head_width,
                                          kernels::CacheFormat::kBf16};
      rate *= static_cast<double>(need_.cache.block_bytes) /
              static_cast<double>(kernels::cache_block_bytes(bf16));
    }
    if (device(g).on_host_cores) {
      rate *= std::min(1.0, kFoldQueriesFree * static_cast<double>(model_.kv_heads) /
                                static_cast<double>(model_.heads));
    }
    const bool all_cores = groups_[g].processor == host_;
    return {{groups_[g].processor, per_byte(all_cores ? rate : together(g, rate))}};
  }

  static Stage stage(double bytes, std::span<const Use> uses, double latency_s = 0) {
    return Stage(static_cast<uint64_t>(std::llround(std::max(0.0, bytes))), uses, latency_s);
  }
  Stage computing(double seconds) const {
    return Stage(static_cast<uint64_t>(std::llround(seconds / compute_unit_s_)),
                 {{host_, compute_unit_s_}});
  }

  /// Bytes at the drives of a group for half of a layer.
  double load(uint32_t g, uint32_t layer, uint32_t half) const {
    const double part = half == 0 ? groups_[g].first_half : 1 - groups_[g].first_half;
    return read_of_layer_[layer] * groups_[g].share * part;
  }
  /// Of a device's memory an eighth is for writing, and of the rest an eighth is kept free.
  double slots(uint32_t g) const {
    return together(g, static_cast<double>(need_.slot_bytes) * 7 / 8 * 7 / 8);
  }

  struct Products {
    double number = 1;
    double parameters = 0;  // that a row is multiplied with
    double touched = 0;     // by all rows
    double outputs = 0;     // of a row
  };
  /// Products of some rows with matrices, which are read once for each pass over them.
  double products_s(const Products& products, double count) const {
    if (count <= 0) return 0;
    const Gpu& gpu = machine_.gpu;
    const double passes = gpu_ ? 1 : std::ceil(count / kRowsOfAPass);
    if (!gpu_ && machine_.host.decode_flops > 0 && machine_.host.decode_bytes_per_s > 0) {
      return row_products_s(products, count, passes);
    }
    return std::max(2 * products.parameters * count / (gpu.peak_flops * gpu.product_efficiency),
                    passes * products.touched * value_bytes() / gpu.memory_bytes_per_s);
  }
  /// A pass takes the time of one row, in which it reads the matrices, and each further row adds as
  /// much: so that 16 rows take what is measured of them.
  double row_products_s(const Products& products, double count, double passes) const {
    constexpr double kMeasuredBytes = 2;  // of a parameter
    const Host& host = machine_.host;
    const double first_s = kMeasuredBytes / host.decode_bytes_per_s;
    const double whole_s = 2 * kRowsOfAPass / host.decode_flops;
    const double further_s = std::max(0.0, (whole_s - first_s) / (kRowsOfAPass - 1));
    const double beside_s =
        host.decode_value_s > 0
            ? products.number * host.decode_product_s +
                  products.outputs * count * host.decode_value_s
            : (kBesideProducts - 1) * products.parameters * count * whole_s / kRowsOfAPass;
    return passes * products.touched * value_bytes() / host.decode_bytes_per_s +
           products.parameters * (count - passes) * further_s + beside_s;
  }
  double qkv_parameters() const {
    return hidden() * static_cast<double>((model_.heads + 2 * model_.kv_heads) * model_.head_size);
  }
  double rest_s(uint32_t layer, double count) const {
    const double active = model_.active_parameters();
    const double all = static_cast<double>(model_.layer_parameters(layer));
    const double touched = std::min(all, active * count);  // of experts, those that are taken
    const double tails = count * static_cast<double>(need_.cache.block_bytes) / 2;
    const double tails_per_s =
        gpu_ ? machine_.host.copy_bytes_per_s : machine_.gpu.memory_bytes_per_s;
    const double output = static_cast<double>(model_.heads * model_.head_size) * hidden();
    const double inner = (active - qkv_parameters() - output) / hidden();  // in and out
    const Products rest{3, active - qkv_parameters(), std::max(0.0, touched - qkv_parameters()),
                        2 * hidden() + inner - static_cast<double>(model_.feed_forward)};
    return products_s(rest, count) + tails / tails_per_s;
  }

  void keep(std::vector<Stage> stages, const DecodeTask& task) {
    done_.push_back(graph_.add_task(std::move(stages), {}));
    for (const uint32_t before : task.after) graph_.add_dependency(done_.back(), done_[before]);
  }

  void add(const DecodeTask& task) {
    switch (task.work) {
      case DecodeWork::kWeights:
        return add_weights(task);
      case DecodeWork::kProducts:
        return add_products(task);
      case DecodeWork::kQueries:
        return add_queries(task);
      case DecodeWork::kRead:
        return add_read(task);
      case DecodeWork::kFold:
        return add_fold(task);
      case DecodeWork::kStates:
        return add_states(task);
      case DecodeWork::kTails:
        return add_tails(task);
      case DecodeWork::kLogits:
        return add_logits(task);
      case DecodeWork::kAppend:
        return add_append(task);
    }
  }

  void add_weights(const DecodeTask& task) {
    double rates = 0;
    for (uint32_t g = 0; g < groups_.size(); ++g) rates += together(g, device(g).reads_only());
    const double bytes = static_cast<double>(model_.layer_parameters(task.layer)) * value_bytes() *
                         together(task.device, device(task.device).reads_only()) / rates;
    std::vector<Use> uses = reading(task.device);
    use_link_up(task.device, uses);
    if (options_.takes_turns()) uses.push_back({copy_, per_byte(machine_.host.copy_bytes_per_s)});
    if (task.step == 1) weights_read_ += bytes;
    keep({stage(bytes, uses)}, task);
  }

  void add_products(const DecodeTask& task) {
    const double parameters = qkv_parameters();
    keep({computing(
             products_s({1, parameters, parameters, parameters / hidden()}, rows(task.half)))},
         task);
    const uint32_t products = done_.back();
    if (gpu_ && !places_.on_gpu[task.layer] && task.half == 0) {
      // Into the place of the layer before the last one.
      const double bytes = static_cast<double>(model_.layer_parameters(task.layer)) * value_bytes();
      const Use link{gpu_down_, per_byte(machine_.gpu.link_bytes_per_s)};
      const uint32_t fetch = graph_.add_task({stage(bytes, std::span(&link, 1))}, {fetched_});
      for (const uint32_t before : task.after) {
        if (options_.in_turn == plan::InTurn::kAll || !schedule_[before].on_host())
          graph_.add_dependency(fetch, done_[before]);
      }
      const size_t layer = size_t{task.step} * need_.cache.layers + task.layer;
      if (layer >= 2) graph_.add_dependency(fetch, layers_done_[layer - 2]);
      graph_.add_dependency(products, fetch);
      fetched_ = fetch;
    }
    if (options_.inputs > 0) add_inputs(task, products);
  }

  /// Keys and values of the sequences that are kept as inputs, made again by the host.
  void add_inputs(const DecodeTask& task, uint32_t products) {
    const double width = hidden();
    const double tokens = static_cast<double>(middle_) * rows(task.half) * options_.inputs;
    const double bytes = tokens * width * value_bytes();
    const Gpu& gpu = machine_.gpu;
    const double flops_per_byte =
        4 * static_cast<double>(model_.kv_heads * model_.head_size) / value_bytes();
    const Use compute{host_, flops_per_byte / (gpu.peak_flops * gpu.product_efficiency)};
    const Use link{gpu_down_, per_byte(gpu.link_bytes_per_s)};
    for (uint32_t g = 0; g < groups_.size(); ++g) {
      std::vector<Use> uses;
      if (!options_.inputs_in_memory) {
        uses = reading(g);
        use_link_up(g, uses);
      }
      uses.push_back(compute);
      if (gpu_) uses.push_back(link);
      const double part = bytes * groups_[g].share;
      if (task.step == 1 && !options_.inputs_in_memory) inputs_read_ += part;
      made_again_[{task.layer, task.half}].push_back(
          graph_.add_task({stage(part, uses)}, {products}));
    }
  }

  void add_queries(const DecodeTask& task) {
    const uint32_t g = task.device;
    const double part = rows(task.half) * groups_[g].share * (1 - options_.inputs);
    const double down = part * static_cast<double>(model_.heads * model_.head_size) * 4;
    std::vector<Use> uses;
    use_link_down(g, uses);
    if (gpu_) uses.push_back({gpu_up_, per_byte(machine_.gpu.link_bytes_per_s)});
    // Rows of values that wait in the host's buffer go along in every step.
    const double buffered = options_.write_back > 1 ? (options_.write_back - 1) / 2.0 : 0;
    const double rows_s = part * static_cast<double>(model_.kv_heads) * buffered *
                          machine_.software.buffered_row_s / groups_[g].count;
    if (need_.in_memory) return keep({}, task);
    keep({stage(fetches() ? 0 : down, uses, latency_s(g) + rows_s)}, task);
  }

  /// The reads themselves come with the fold, piece by piece.
  void add_read(const DecodeTask& task) { keep({}, task); }

  void add_fold(const DecodeTask& task) {
    const uint32_t g = task.device;
    const std::vector<Use> reads = fetches() ? fetching(g) : reading(g);
    std::vector<Use> folds;
    if (!fetches()) folds = folding(g);
    const double all = load(g, task.layer, task.half);
    if (need_.in_memory) return keep({stage(all, folds)}, task);
    if (options_.takes_turns()) {
      std::vector<Use> uses = reads;
      uses.insert(uses.end(), folds.begin(), folds.end());
      return keep({stage(all, uses)}, task);
    }
    // What is folded frees its slots for what is read next.
    Group& group = groups_[g];
    const auto pieces = static_cast<uint64_t>(
        std::clamp(std::ceil(all / (slots(g) / 4)), 1.0, static_cast<double>(kPiecesMax)));
    const double bytes = all / static_cast<double>(pieces);
    for (uint64_t i = 0; i < pieces; ++i) {
      uint32_t room = EventGraph::kNone;
      double held = bytes;
      for (auto piece = group.folded.rbegin(); piece != group.folded.rend(); ++piece) {
        // Two pieces always: large ones stand for many reads.
        if (held + piece->bytes > slots(g) && piece != group.folded.rbegin()) {
          room = piece->task;
          break;
        }
        held += piece->bytes;
      }
      const uint32_t read = graph_.add_task({stage(bytes * read_share_, reads)},
                                            {group.read, room, done_[done_.size() - 1]});
      group.read = read;
      const uint32_t before = group.folded.empty() ? EventGraph::kNone : group.folded.back().task;
      const uint32_t fold = graph_.add_task({stage(fetches() ? 0 : bytes, folds)}, {read, before});
      for (const uint32_t one : task.after) graph_.add_dependency(fold, done_[one]);
      group.folded.push_back({bytes, fold});
      while (group.folded.size() > kPiecesMax * 8) group.folded.pop_front();
    }
    done_.push_back(group.folded.back().task);
  }

  void add_states(const DecodeTask& task) {
    const uint32_t g = task.device;
    const double part = rows(task.half) * groups_[g].share * (1 - options_.inputs);
    const double up = part * static_cast<double>(model_.heads * (model_.head_size + 2)) * 4;
    std::vector<Use> uses;
    use_link_up(g, uses);
    if (gpu_) uses.push_back({gpu_down_, per_byte(machine_.gpu.link_bytes_per_s)});
    if (need_.in_memory) return keep({}, task);
    keep({stage(fetches() ? 0 : up, uses, latency_s(g))}, task);
  }

  void add_tails(const DecodeTask& task) {
    keep({computing(rest_s(task.layer, rows(task.half)))}, task);
    for (const uint32_t made : std::exchange(made_again_[{task.layer, task.half}], {})) {
      graph_.add_dependency(done_.back(), made);
    }
    if (task.half + 1 == halves_) layers_done_.push_back(done_.back());
  }

  void add_logits(const DecodeTask& task) {
    const auto outputs = static_cast<double>(model_.vocabulary);
    const double head = hidden() * outputs;
    keep({computing(products_s({1, head, head, outputs}, rows(task.half)))}, task);
  }

  void add_append(const DecodeTask& task) {
    const uint32_t g = task.device;
    const double keys = static_cast<double>(2 * model_.kv_heads * model_.head_size);
    const double kept =
        1 - options_.inputs + (options_.inputs_in_memory ? 0 : options_.inputs * hidden() / keys);
    const double bytes =
        need_.in_memory ? 0 : static_cast<double>(step_.written) * groups_[g].share * kept;
    std::vector<Use> uses{
        {groups_[g].drive,
         per_byte(together(g, device(g).write_bytes_per_s / device(g).write_amplification)),
         Direction::kWrite}};
    use_link_down(g, uses);
    double commands_s = 0;
    if (options_.write_back > 0) {
      // An entry is a head's row of keys or of values.
      const double entries = sequences() * groups_[g].share / groups_[g].count * 2 *
                             static_cast<double>(model_.kv_heads * need_.cache.layers);
      commands_s = entries / options_.write_back * device(g).latency_s;
    }
    keep({stage(bytes, uses, commands_s)}, task);
  }

  GenerationTimes times_between(double from_s, double to_s) {
    GenerationTimes times;
    times.step_s = to_s - from_s;
    times.tokens_per_s = sequences() / times.step_s;
    times.events = graph_.task_count();
    std::map<std::string, double> busy;
    for (uint32_t r = 0; r < graph_.resource_count(); ++r) {
      double& most = busy[graph_.resource_name(r)];
      most = std::max(most, graph_.busy_s(r, from_s, to_s) / times.step_s);
    }
    for (const auto& [name, share] : busy) {
      if (share > 0) times.busy.push_back({name, share});
    }
    std::ranges::stable_sort(
        times.busy, [](const Utilization& a, const Utilization& b) { return a.share > b.share; });
    times.bound_by = times.busy.front().resource;
    const auto whole = [](double bytes) { return static_cast<uint64_t>(std::llround(bytes)); };
    times.weights_read = whole(weights_read_);
    if (need_.in_memory) return times;
    // What the formula says of all blocks, less those that are kept as inputs.
    const double not_inputs = 1 - options_.inputs;
    const double read = static_cast<double>(step_.read) * not_inputs;
    const double keys = static_cast<double>(2 * model_.kv_heads * model_.head_size);
    const double kept =
        not_inputs + (options_.inputs_in_memory ? 0 : options_.inputs * hidden() / keys);
    times.traffic.read = whole(read * read_share_ + inputs_read_);
    times.traffic.written = whole(static_cast<double>(step_.written) * kept);
    times.traffic.link_down = whole(static_cast<double>(step_.link_down) * not_inputs);
    times.traffic.link_up =
        whole(fetches() ? read : static_cast<double>(step_.link_up) * not_inputs + inputs_read_);
    return times;
  }

  struct Group {
    uint32_t count = 1;
    double share = 0;       // of all pieces, as if each device had as many as the fullest
    double first_half = 1;  // of its pieces
    uint32_t drive = 0, processor = 0, down = 0, up = 0;
    uint32_t read = EventGraph::kNone;  // the last piece
    struct Piece {
      double bytes = 0;
      uint32_t task = 0;
    };
    std::deque<Piece> folded;
  };

  const ModelShape& model_;
  const Machine& machine_;
  const GenerationOptions& options_;
  const GenerationNeed& need_;
  std::vector<GroupLoad> loads_;
  uint64_t pieces_;
  LayerPlaces places_;
  bool gpu_;
  uint32_t halves_ = 2;
  uint64_t middle_ = 0;                // tokens that a sequence has
  plan::CacheTraffic step_;            // of all sequences
  double read_share_ = 1;              // of its blocks, that no memory keeps
  std::vector<double> read_of_layer_;  // bytes of all blocks, without sequences kept as inputs

  EventGraph graph_;
  double compute_unit_s_ = 1e-9;  // seconds of computing, as a "byte" of a stage
  uint32_t host_ = 0, host_down_ = 0, host_up_ = 0, gpu_down_ = 0, gpu_up_ = 0, copy_ = 0;
  uint32_t net_out_ = 0, net_in_ = 0;
  std::vector<Group> groups_;
  std::vector<DecodeTask> schedule_;
  std::vector<uint32_t> done_;            // by task of the schedule, that of the graph
  std::vector<uint32_t> layers_done_;     // ends of layers
  uint32_t fetched_ = EventGraph::kNone;  // the last layer's weights on the GPU
  std::map<std::pair<uint32_t, uint32_t>, std::vector<uint32_t>> made_again_;
  double inputs_read_ = 0;  // in the second step
  double weights_read_ = 0;
};

}  // namespace

CachePieces cache_pieces(const plan::CacheModel& cache, const GenerationOptions& options) {
  const uint64_t longest = options.context + options.tokens;
  const uint64_t shared = options.prefix / cache.block_tokens * cache.block_tokens;
  if (shared == 0) return {options.sequences, plan::drive_bytes(cache, longest)};
  return {1, plan::drive_bytes(cache, shared) +
                 options.sequences * plan::drive_bytes(cache, longest - shared)};
}

Result<std::vector<GroupLoad>> group_loads(const CachePieces& pieces, const Machine& machine) {
  constexpr uint64_t kBundlesMax = 4096;
  const uint64_t bundle = base::divide_up(pieces.count, kBundlesMax);
  std::vector<plan::Subgroup> bundles;
  for (uint64_t first = 0; first < pieces.count; first += bundle) {
    plan::Subgroup one;
    one.first = first;
    one.count = std::min(bundle, pieces.count - first);
    bundles.push_back(one);
  }
  std::vector<plan::DeviceCapacity> capacities;
  for (const DeviceGroup* device : machine.each_device()) {
    plan::DeviceCapacity capacity;
    capacity.bandwidth = device->reads_only();
    if (device->capacity_bytes > 0) capacity.elements_max = device->capacity_bytes / pieces.bytes;
    capacities.push_back(capacity);
  }
  SI_ASSIGN_OR_RETURN(const std::vector<base::DeviceId> owner, plan::place(bundles, capacities));
  std::vector<GroupLoad> all(capacities.size());
  for (size_t i = 0; i < owner.size(); ++i) all[owner[i].value].pieces += bundles[i].count;
  std::vector<GroupLoad> loads;
  auto first = all.begin();
  for (const DeviceGroup& group : machine.devices) {
    loads.push_back(*std::max_element(first, first + group.count, [](const auto& a, const auto& b) {
      return a.pieces < b.pieces;
    }));
    loads.back().group = &group;
    loads.back().first_half = (loads.back().pieces + 1) / 2;
    first += group.count;
  }
  return loads;
}

uint64_t streamed_weight_bytes(const ModelShape& model, const GenerationOptions& options,
                               const GenerationNeed& need) {
  const LayerPlaces places = places_of(model, options, need);
  uint64_t parameters = 0;
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    if (places.streamed[layer]) parameters += model.layer_parameters(layer);
  }
  return parameters * options.value_bytes();
}

Result<GenerationTimes> run_generation_step(const ModelShape& model, const Machine& machine,
                                            const GenerationOptions& options,
                                            const GenerationNeed& need) {
  for (const DeviceGroup& group : machine.devices) {
    if (options.attention == AttentionPlace::kHost || fold_rate(group) > 0) continue;
    return Status(ErrorCode::kUnsupported,
                  fmt::format("device '{}' has no processor that attends", group.name),
                  "Set device.fold_bytes_per_s in the machine file, or use --attention host.");
  }
  const CachePieces pieces = cache_pieces(need.cache, options);
  std::vector<GroupLoad> loads{{&machine.devices.front(), pieces.count, pieces.count}};
  if (!need.in_memory) {
    SI_ASSIGN_OR_RETURN(loads, group_loads(pieces, machine));
  }
  return GenerationGraph(model, machine, options, need, std::move(loads), pieces.count).run();
}

}  // namespace smartinf::sim
