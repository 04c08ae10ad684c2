#include "smartinf/engine/device_key_value_store.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/check.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/device.h"
#include "smartinf/engine/device_replies.h"
#include "smartinf/engine/sequence_table.h"
#include "smartinf/engine/smallest_state.h"
#include "smartinf/plan/cache_placement.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr uint32_t kBlockTokens = kernels::kCacheBlockTokens;
constexpr uint64_t kStagingBytes = base::kMiB;  // blocks of a prompt that go to a device at once
constexpr size_t kAttendsMax = 2;

class DeviceStore final : public KeyValueStore {
 public:
  explicit DeviceStore(DeviceStoreOptions options)
      : options_(std::move(options)),
        shape_(options_.shape.attention),
        block_bytes_(kernels::cache_block_bytes(shape_.block)),
        watch_(options_.device_silence_max),
        replies_(watch_) {}
  Status open_devices(const DeviceSources& sources);

  Status open(SequenceId id, uint64_t tokens_max, SharedPrefix prefix) override;
  uint64_t tokens(SequenceId id) const override;
  Status append(SequenceId id, uint32_t layer, uint64_t count, base::DataType type,
                const void* keys, const void* values) override;
  Result<AttendTicket> begin_attend(uint32_t layer, std::span<const AttendQuery> queries) override;
  Status finish_attend(AttendTicket ticket) override;
  Status failure(SequenceId id) const override;
  void close(SequenceId id) override;
  Status save() override;
  base::TrafficReading traffic() const override {
    base::TrafficReading all;
    for (const auto& device : devices_) all += device->store_traffic();
    return all;
  }
  double wait_seconds() const override { return wait_s_; }

 private:
  /// What a device says to a message; stays where it is until then.
  struct Reply {
    bool pending = false;
    Status status;
  };
  struct Layer {
    uint64_t blocks = 0;  // on the device
    std::span<std::byte> tail;
    uint32_t tail_tokens = 0;    // up to a whole block
    uint32_t prompt_tokens = 0;  // of them, the first ones, which decoding alone cannot make again
    uint32_t saved_tokens = 0;   // of them, that the device keeps
    Reply appended;              // the tail, whole, to the device
    bool sent = false;
    uint64_t tokens() const { return blocks * kBlockTokens + tail_tokens; }
  };
  struct Sequence : SharingSequence<Sequence> {
    SequenceId id = 0;
    size_t device = 0;  // its prefix's as well
    uint64_t tokens_max = 0;
    base::AlignedBuffer tails;
    std::vector<Layer> layers;  // behind the prefix
    Status failed;

    uint64_t own_tokens_max() const { return tokens_max - prefix_tokens; }
    /// Why it cannot go on.
    const Status& failure() const {
      return failed.ok() && prefix != nullptr ? prefix->failed : failed;
    }
  };
  struct Attending {
    SequenceId id = 0;
    const float* query = nullptr;
    float* out = nullptr;
    std::vector<float> state;
    csd::Attend message;  // state_out empty: nothing is asked for
    Reply reply;
  };
  struct Attends {
    AttendTicket ticket = 0;
    uint32_t layer = 0;
    std::deque<Attending> queries;
  };

  void submit(size_t device, csd::Message message, Reply& reply);
  const Status& wait(Reply& reply);
  Status run(size_t device, csd::Message message);
  /// Notes that the sequence cannot go on.
  Status fail(Sequence& sequence, Status why);
  Result<uint64_t> place(Sequence& sequence);
  uint64_t bytes_of(const Sequence& sequence) const;
  void forget(Sequence& sequence);
  Status read_tails(Sequence& sequence, uint32_t tokens);
  void send_tail(Sequence& sequence, uint32_t layer);
  Status take_tail(Sequence& sequence, Layer& layer);
  Status append_blocks(Sequence& sequence, uint32_t layer, uint64_t count, base::DataType type,
                       const void* keys, const void* values);
  void make_query(const Sequence& sequence, uint32_t layer, const AttendQuery& query,
                  Attending& one) const;
  bool prefix_is_damaged(const Attending& one);
  Status finish_query(uint32_t layer, Attending& one);
  void note_order(uint32_t layer, std::span<const AttendQuery> queries);

  const DeviceStoreOptions options_;
  const kernels::AttentionShape& shape_;
  const uint64_t block_bytes_;
  DeviceWatch watch_;
  DeviceReplies replies_;
  std::unordered_map<const csd::Command*, Reply*> waiting_;
  SequenceTable<Sequence> sequences_;
  std::vector<plan::CacheDevice> placed_;
  std::vector<bool> has_saved_;
  std::vector<std::byte> staging_;
  std::deque<Attends> attends_;
  AttendTicket next_ticket_ = 1;
  double wait_s_ = 0;
  // In the order in which queries come; of the step that is under way, and as the devices know it.
  std::vector<csd::LayerSequence> order_;
  std::vector<csd::LayerSequence> known_order_;
  std::set<std::pair<uint32_t, SequenceId>> in_order_;
  std::vector<std::unique_ptr<csd::Device>> devices_;  // destroyed first
};

// ---- Devices.

Status DeviceStore::open_devices(const DeviceSources& sources) {
  if (sources.empty()) {
    return Status(ErrorCode::kInvalidArgument, "no device is given for keys and values",
                  "Name at least one directory.");
  }
  csd::DeviceShare share;
  share.slot_memory_bytes = uint64_t{64} << 20;  // at most; one slot of a block is made
  share.gradient_memory_bytes = share.slot_memory_bytes;
  for (size_t d = 0; d < sources.size(); ++d) {
    csd::DeviceSource& source = *sources[d];
    share.cache_memory_bytes = options_.device_memory_bytes;
    if (!options_.kept_bytes.empty()) share.cache_memory_bytes += options_.kept_bytes.at(d);
    auto device = open_or_make_smallest(source, share);
    if (!device.ok()) return std::move(device).status().with_context("device " + source.name());
    devices_.push_back(std::move(*device));
    SI_ASSIGN_OR_RETURN(const double bandwidth, source.bandwidth());
    placed_.push_back({bandwidth, 0});
    csd::OpenCache open;
    open.job = options_.job;
    open.device_index = static_cast<uint32_t>(d);
    open.device_count = static_cast<uint32_t>(sources.size());
    open.layers = options_.shape.layers;
    open.shape = shape_;
    open.identity = options_.identity;
    open.afresh = options_.afresh;
    uint64_t saved = 0;
    open.saved_sequences = &saved;
    SI_RETURN_IF_ERROR(run(d, open));
    has_saved_.push_back(saved > 0);
  }
  staging_.resize(std::max<uint64_t>(1, kStagingBytes / block_bytes_) * block_bytes_);
  return Status();
}

void DeviceStore::submit(size_t device, csd::Message message, Reply& reply) {
  reply.pending = true;
  waiting_[replies_.submit(*devices_[device], std::move(message))] = &reply;
}

const Status& DeviceStore::wait(Reply& reply) {
  while (reply.pending) {
    csd::Completion done = replies_.next();
    const auto waiting = waiting_.find(done.command);
    SI_CHECK(waiting != waiting_.end(), "an answer to nothing");
    waiting->second->pending = false;
    waiting->second->status = std::move(done.status);
    waiting_.erase(waiting);
  }
  return reply.status;
}

Status DeviceStore::run(size_t device, csd::Message message) {
  Reply reply;
  submit(device, std::move(message), reply);
  return wait(reply);
}

// ---- Sequences.

Status DeviceStore::fail(Sequence& sequence, Status why) {
  if (sequence.failed.ok()) {
    sequence.failed = std::move(why).with_context("sequence " + std::to_string(sequence.id));
  }
  return sequence.failed;
}

/// Finds the device that has saved it, or one that has room; beside a prefix only its own. Returns
/// the tokens that were saved.
Result<uint64_t> DeviceStore::place(Sequence& sequence) {
  const uint64_t tokens_max = sequence.own_tokens_max();
  const auto may_be = [&](size_t d) {
    return sequence.prefix == nullptr || sequence.prefix->device == d;
  };
  uint64_t saved = 0;
  for (size_t d = 0; d < devices_.size(); ++d) {
    if (!has_saved_[d] || !may_be(d)) continue;
    const Status found = run(d, csd::OpenSequence{sequence.id, tokens_max, true, &saved});
    sequence.device = d;
    if (found.ok()) return saved;
  }
  Status refused;
  for (const size_t d : plan::cache_placement(placed_, bytes_of(sequence))) {
    if (!may_be(d)) continue;
    Status opened = run(d, csd::OpenSequence{sequence.id, tokens_max, false, &saved});
    sequence.device = d;
    if (opened.ok()) return saved;
    // A caller has an answer to a lack of room, also beside a device that is lost.
    if (refused.ok() || opened.code() == ErrorCode::kNoSpace) refused = std::move(opened);
  }
  return refused;
}

/// On its device.
uint64_t DeviceStore::bytes_of(const Sequence& sequence) const {
  return base::divide_up(sequence.own_tokens_max(), uint64_t{kBlockTokens}) *
         options_.shape.layers * block_bytes_;
}

Status DeviceStore::open(SequenceId id, uint64_t tokens_max, SharedPrefix prefix) {
  SI_ASSIGN_OR_RETURN(const bool again, sequences_.begin_open(id, tokens_max, prefix));
  if (again) return Status();
  const uint64_t layers = options_.shape.layers;
  Sequence sequence;
  sequence.id = id;
  sequence.tokens_max = tokens_max;
  if (prefix.tokens > 0) {
    sequence.prefix = sequences_.find(prefix.id);
    sequence.prefix_tokens = prefix.tokens;
    SI_RETURN_IF_ERROR(sequence.prefix->failed);
  }
  SI_ASSIGN_OR_RETURN(sequence.tails, base::AlignedBuffer::allocate(layers * block_bytes_));
  sequence.layers.resize(layers);
  for (size_t i = 0; i < layers; ++i) {
    sequence.layers[i].tail = sequence.tails.bytes().subspan(i * block_bytes_, block_bytes_);
  }
  SI_ASSIGN_OR_RETURN(const uint64_t saved, place(sequence));
  for (Layer& layer : sequence.layers) layer.blocks = saved / kBlockTokens;
  if (const uint32_t tail = saved % kBlockTokens; tail > 0) {
    if (Status read = read_tails(sequence, tail); !read.ok()) {
      // To be computed anew.
      base::log(base::LogLevel::kWarning, read.to_string());
      (void)run(sequence.device, csd::CloseSequence{id});
      return open(id, tokens_max, prefix);
    }
  }
  placed_[sequence.device].bytes_used += bytes_of(sequence);
  sequences_.add(id, std::move(sequence), prefix);
  return Status();
}

Status DeviceStore::read_tails(Sequence& sequence, uint32_t tokens) {
  for (uint32_t i = 0; i < sequence.layers.size(); ++i) {
    Layer& layer = sequence.layers[i];
    SI_RETURN_IF_ERROR(run(sequence.device, csd::ReadTail{sequence.id, i, tokens, layer.tail}));
    layer.tail_tokens = layer.prompt_tokens = layer.saved_tokens = tokens;
  }
  return Status();
}

uint64_t DeviceStore::tokens(SequenceId id) const {
  const Sequence* sequence = sequences_.find(id);
  if (sequence == nullptr) return 0;
  uint64_t tokens = ~uint64_t{0};
  for (const Layer& layer : sequence->layers) tokens = std::min(tokens, layer.tokens());
  return sequence->prefix_tokens + tokens;
}

Status DeviceStore::failure(SequenceId id) const {
  const Sequence* sequence = sequences_.find(id);
  return sequence == nullptr ? Status() : sequence->failure();
}

void DeviceStore::close(SequenceId id) {
  sequences_.close(id, [&](SequenceId, Sequence& sequence) { forget(sequence); });
}

void DeviceStore::forget(Sequence& sequence) {
  for (Layer& layer : sequence.layers) (void)wait(layer.appended);
  const Status closed = run(sequence.device, csd::CloseSequence{sequence.id});
  if (!closed.ok() && sequence.failed.ok()) {
    base::log(base::LogLevel::kWarning, closed.to_string());
  }
  placed_[sequence.device].bytes_used -= bytes_of(sequence);
}

// ---- Keys and values that come.

/// A whole tail goes to the device; it stays here, and is folded here, until take_tail().
void DeviceStore::send_tail(Sequence& sequence, uint32_t index) {
  Layer& layer = sequence.layers[index];
  if (layer.sent || layer.tail_tokens < kBlockTokens || !sequence.failed.ok()) return;
  layer.sent = true;
  submit(sequence.device,
         csd::AppendKeysValues{sequence.id, index, layer.blocks * kBlockTokens, kBlockTokens,
                               layer.tail},
         layer.appended);
}

/// The device has it.
Status DeviceStore::take_tail(Sequence& sequence, Layer& layer) {
  if (Status appended = wait(layer.appended); !appended.ok()) {
    return fail(sequence, std::move(appended));
  }
  ++layer.blocks;
  std::ranges::fill(layer.tail, std::byte{0});
  layer.tail_tokens = layer.prompt_tokens = layer.saved_tokens = 0;
  layer.sent = false;
  return Status();
}

/// Whole blocks, where there is no tail.
Status DeviceStore::append_blocks(Sequence& sequence, uint32_t index, uint64_t count,
                                  base::DataType type, const void* keys, const void* values) {
  Layer& layer = sequence.layers[index];
  const auto staged = std::span(staging_).first(count / kBlockTokens * block_bytes_);
  std::ranges::fill(staged, std::byte{0});
  const uint64_t step = uint64_t{kBlockTokens} * shape_.block.kv_heads * shape_.block.head_width *
                        base::data_type_bytes(type);
  for (uint64_t block = 0; block < count / kBlockTokens; ++block) {
    kernels::append_tokens(shape_.block, staged.subspan(block * block_bytes_, block_bytes_), 0,
                           kBlockTokens, type, static_cast<const std::byte*>(keys) + block * step,
                           static_cast<const std::byte*>(values) + block * step);
  }
  Status appended =
      run(sequence.device,
          csd::AppendKeysValues{sequence.id, index, layer.blocks * kBlockTokens, count, staged});
  if (!appended.ok()) return fail(sequence, std::move(appended));
  layer.blocks += count / kBlockTokens;
  return Status();
}

Status DeviceStore::append(SequenceId id, uint32_t index, uint64_t count, base::DataType type,
                           const void* keys, const void* values) {
  Sequence* sequence = sequences_.find(id);
  if (sequence == nullptr) return sequence_not_open(id);
  SI_RETURN_IF_ERROR(sequence->failure());
  Layer& layer = sequence->layers.at(index);
  if (count > sequence->own_tokens_max() - layer.tokens()) {
    return Status(ErrorCode::kOutOfMemory,
                  "sequence " + std::to_string(id) + " has " +
                      std::to_string(sequence->prefix_tokens + layer.tokens()) +
                      " tokens of at most " + std::to_string(sequence->tokens_max) + ", and " +
                      std::to_string(count) + " more do not fit");
  }
  const bool of_prompt = count > 1;
  const auto* key = static_cast<const std::byte*>(keys);
  const auto* value = static_cast<const std::byte*>(values);
  while (count > 0) {
    if (layer.tail_tokens == kBlockTokens) {
      send_tail(*sequence, index);
      SI_RETURN_IF_ERROR(take_tail(*sequence, layer));
    }
    uint64_t some = 0;
    if (layer.tail_tokens == 0 && count >= kBlockTokens) {
      some = std::min(count / kBlockTokens, staging_.size() / block_bytes_) * kBlockTokens;
      SI_RETURN_IF_ERROR(append_blocks(*sequence, index, some, type, key, value));
    } else {
      some = std::min<uint64_t>(count, kBlockTokens - layer.tail_tokens);
      kernels::append_tokens(shape_.block, layer.tail, layer.tail_tokens,
                             static_cast<uint32_t>(some), type, key, value);
      layer.tail_tokens += static_cast<uint32_t>(some);
      if (of_prompt) layer.prompt_tokens = layer.tail_tokens;
    }
    const uint64_t bytes =
        some * shape_.block.kv_heads * shape_.block.head_width * base::data_type_bytes(type);
    key += bytes;
    value += bytes;
    count -= some;
  }
  return Status();
}

Status DeviceStore::save() {
  for (auto& [id, sequence] : sequences_.all()) {
    for (uint32_t i = 0; i < sequence.layers.size() && sequence.failed.ok(); ++i) {
      Layer& layer = sequence.layers[i];
      if (layer.tail_tokens == kBlockTokens) {
        send_tail(sequence, i);
        (void)take_tail(sequence, layer);
      } else if (layer.prompt_tokens > layer.saved_tokens) {
        Status appended =
            run(sequence.device, csd::AppendKeysValues{id, i, layer.blocks * kBlockTokens,
                                                       layer.tail_tokens, layer.tail});
        if (appended.ok()) {
          layer.saved_tokens = layer.tail_tokens;
        } else {
          (void)fail(sequence, std::move(appended));
        }
      }
    }
  }
  std::deque<Reply> saved(devices_.size());
  for (size_t d = 0; d < devices_.size(); ++d) submit(d, csd::SaveCache{}, saved[d]);
  Status first;
  for (Reply& reply : saved) {
    if (Status status = wait(reply); !status.ok() && first.ok()) first = std::move(status);
  }
  return first;
}

// ---- Queries.

/// Devices read ahead in the order of the last step, when it is another one than they know.
void DeviceStore::note_order(uint32_t layer, std::span<const AttendQuery> queries) {
  if (!queries.empty() && in_order_.contains({layer, queries.front().id})) {
    if (order_ != known_order_) {
      for (size_t d = 0; d < devices_.size(); ++d) {
        csd::AttendOrder message;
        for (const csd::LayerSequence& one : order_) {
          const auto sequence = sequences_.all().find(one.id);
          if (sequence != sequences_.all().end() && sequence->second.device == d) {
            message.order.push_back(one);
          }
        }
        (void)run(d, std::move(message));
      }
      known_order_ = order_;
    }
    order_.clear();
    in_order_.clear();
  }
  for (const AttendQuery& query : queries) {
    const Sequence* prefix = sequences_.find(query.id)->prefix;
    if (prefix != nullptr && in_order_.emplace(layer, prefix->id).second) {
      order_.push_back({layer, prefix->id});
    }
    order_.push_back({layer, query.id});
    in_order_.emplace(layer, query.id);
  }
}

Result<AttendTicket> DeviceStore::begin_attend(uint32_t layer,
                                               std::span<const AttendQuery> queries) {
  SI_CHECK(attends_.size() < kAttendsMax, "two attends are under way already");
  for (const AttendQuery& query : queries) {
    if (sequences_.find(query.id) == nullptr) return sequence_not_open(query.id);
  }
  note_order(layer, queries);
  Attends& attends = attends_.emplace_back();
  attends.ticket = next_ticket_++;
  attends.layer = layer;
  std::vector<Attending*> asked;
  for (const AttendQuery& query : queries) {
    Attending& one = attends.queries.emplace_back();
    make_query(*sequences_.find(query.id), layer, query, one);
    if (!one.message.state_out.empty()) asked.push_back(&one);
  }
  for (size_t i = 0; i < asked.size(); ++i) {
    csd::Attend& message = asked[i]->message;
    if (i + 1 < asked.size() && message.prefix_end_token > 0) {
      const csd::Attend& next = asked[i + 1]->message;
      message.more = next.prefix_end_token > 0 && next.prefix_id == message.prefix_id;
    }
    submit(sequences_.find(message.id)->device, message, asked[i]->reply);
  }
  return attends.ticket;
}

void DeviceStore::make_query(const Sequence& sequence, uint32_t index, const AttendQuery& query,
                             Attending& one) const {
  one.id = query.id;
  one.query = query.query;
  one.out = query.out;
  if (!sequence.failure().ok()) return;
  const Layer& layer = sequence.layers.at(index);
  const uint64_t shared = sequence.prefix_tokens;
  const uint64_t first = options_.shape.first_seen(index, shared + layer.tokens());
  one.state.resize(shape_.state_floats());
  csd::Attend& message = one.message;
  message.id = query.id;
  message.layer = index;
  message.end_token = layer.blocks * kBlockTokens;
  message.first_token = std::min(std::max(first, shared) - shared, message.end_token);
  if (first < shared) {
    message.prefix_id = sequence.prefix->id;
    message.prefix_first_token = first;
    message.prefix_end_token = shared;
  } else if (message.first_token == message.end_token) {
    return kernels::begin_fold(shape_, one.state.data());
  }
  message.query =
      std::as_bytes(std::span(query.query, uint64_t{shape_.heads} * shape_.block.head_width));
  message.state_out = std::as_writable_bytes(std::span(one.state));
}

Status DeviceStore::finish_attend(AttendTicket ticket) {
  const auto attends = std::ranges::find(attends_, ticket, &Attends::ticket);
  SI_CHECK(attends != attends_.end(), "an attend that was not begun");
  Status first;
  for (Attending& one : attends->queries) {
    if (Status status = finish_query(attends->layer, one); !status.ok() && first.ok()) {
      first = std::move(status);
    }
  }
  attends_.erase(attends);
  return first;
}

/// Whether the prefix fails by itself: then all sequences that share it do.
bool DeviceStore::prefix_is_damaged(const Attending& one) {
  std::vector<float> state(one.state.size());
  csd::Attend alone;
  alone.id = one.message.prefix_id;
  alone.layer = one.message.layer;
  alone.first_token = one.message.prefix_first_token;
  alone.end_token = one.message.prefix_end_token;
  alone.query = one.message.query;
  alone.state_out = std::as_writable_bytes(std::span(state));
  return !run(sequences_.find(one.id)->device, alone).ok();
}

Status DeviceStore::finish_query(uint32_t index, Attending& one) {
  // Also of a sequence that has failed: its memory is not the device's any more.
  const uint64_t begin_ns = base::now_ns();
  const Status attended = wait(one.reply);
  wait_s_ += base::seconds_since(begin_ns);
  Sequence* sequence = sequences_.find(one.id);
  if (sequence == nullptr) return sequence_not_open(one.id);
  SI_RETURN_IF_ERROR(sequence->failure());
  if (!attended.ok()) {
    const bool shared = one.message.prefix_end_token > 0 && prefix_is_damaged(one);
    return fail(shared ? *sequence->prefix : *sequence, attended);
  }
  const Layer& layer = sequence->layers[index];
  const uint64_t tokens = sequence->prefix_tokens + layer.tokens();
  const kernels::FoldRange range =
      kernels::range_in_block(sequence->prefix_tokens / kBlockTokens + layer.blocks,
                              options_.shape.first_seen(index, tokens), tokens);
  const kernels::FoldQuery query{one.query, one.state.data()};
  kernels::fold_block(shape_, layer.tail, range, {&query, 1});
  kernels::finish_fold(shape_, one.state.data(), one.out);
  // Beside what the caller computes next.
  send_tail(*sequence, index);
  return Status();
}

}  // namespace

Result<std::unique_ptr<KeyValueStore>> make_device_store(const DeviceSources& sources,
                                                         DeviceStoreOptions options) {
  auto store = std::make_unique<DeviceStore>(std::move(options));
  SI_RETURN_IF_ERROR(store->open_devices(sources));
  return std::unique_ptr<KeyValueStore>(std::move(store));
}

Status erase_device_store(const DeviceSources& sources) {
  Status first;
  for (const auto& source : sources) {
    const Result<storage::StoreSummary> found = source->summarize();
    if (found.status().code() == ErrorCode::kNotFound) continue;
    Status erased = found.status();
    if (found.ok() && is_smallest(found->layout)) erased = source->erase();
    if (first.ok()) first = std::move(erased);
  }
  return first;
}

}  // namespace smartinf::engine
