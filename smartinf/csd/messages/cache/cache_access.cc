#include "smartinf/csd/messages/cache/cache_access.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include <pthread.h>

#include "smartinf/base/check.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/core_pinning.h"
#include "smartinf/csd/linked_ring.h"
#include "smartinf/csd/messages/cache/cache_memory.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::csd {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using storage::CachedLayer;
using storage::CachedSequence;

constexpr uint64_t kBlockTokens = kernels::kCacheBlockTokens;
constexpr uint64_t kChunksMin = 8;                  // reads that overlap, where memory allows
constexpr uint64_t kPendingEnough = 10;             // blocks to be written
// How long the cache's thread sleeps at the drive before it looks at its messages.
constexpr std::chrono::microseconds kPollWait{200};

Status no_sequence(uint64_t id) {
  return Status(ErrorCode::kNotFound, "sequence " + std::to_string(id) + " is not open");
}
Status invalid(std::string what) { return Status(ErrorCode::kInvalidArgument, std::move(what)); }

/// Tokens that all layers have; cuts off what some have beyond. A block that is not whole stays if
/// all layers have it.
uint64_t cut_to_shortest(CachedSequence& sequence) {
  uint64_t shortest = ~uint64_t{0};
  uint64_t longest = 0;
  for (const CachedLayer& layer : sequence.layers) {
    shortest = std::min(shortest, layer.tokens(kBlockTokens));
    longest = std::max(longest, layer.tokens(kBlockTokens));
  }
  if (shortest == longest) return shortest;
  for (CachedLayer& layer : sequence.layers) {
    layer.sums.resize(shortest / kBlockTokens);
    layer.tail_tokens = 0;
  }
  return shortest / kBlockTokens * kBlockTokens;
}

}  // namespace

CacheAccess::~CacheAccess() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    wake();
  }
  if (thread_.joinable()) thread_.join();
  workers_.reset();
  if (file_ == nullptr || file_->close().ok()) return;
  // The drive may still write there.
  storage::leak_in_flight(std::move(file_));
  storage::leak_in_flight(std::move(memory_));
  storage::leak_in_flight(std::move(kept_memory_));
  storage::leak_in_flight(std::move(blocks_));
  storage::leak_in_flight(std::move(scans_));
}

bool CacheAccess::serves(const Command& command) const { return is_cache_message(command.message); }

void CacheAccess::serve(Command& command, Status refusal) {
  if (refusal.ok() && parts_.options.cache_memory_bytes == 0) {
    refusal = Status(ErrorCode::kUnsupported, "the device was opened without memory for a cache",
                     "Give it some (DeviceShare::cache_memory_bytes).");
  }
  if (!refusal.ok()) return parts_.complete(command, std::move(refusal));
  const std::lock_guard lock(mutex_);
  commands_.push_back(&command);
  wake();
  if (thread_.joinable()) return;
  thread_ = std::jthread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "si-cache");
}

void CacheAccess::wake() {
  awake_ = true;
  changed_.notify_one();
}

void CacheAccess::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    awake_ = false;
    if (closing_) {
      const Status closes(ErrorCode::kCancelled, "the device is closing");
      for (Command* command : std::exchange(commands_, {})) answer(*command, closes);
      begin_gathered();
      for (auto attending = attending_.begin(); attending != attending_.end();) {
        Attending& one = *attending++;
        one.status = closes;
        go_on(one);
      }
      for (Late& late : late_) late.due_ns = 0;
    }
    while (!commands_.empty() && try_serve(*commands_.front(), lock)) commands_.pop_front();
    if (file_ != nullptr && broken_.ok() && !closing_) {
      if (!waits_for_quiet_) scans_->start();
      start_writes();
    }
    const uint64_t due_ns = answer_late();
    const bool moving = file_ != nullptr && broken_.ok() && file_->queue().in_flight() > 0;
    if (closing_ && attending_.empty() && late_.empty() && commands_.empty()) return;
    if (moving) {
      poll(lock);
    } else if (!awake_) {
      const uint64_t now = base::now_ns();
      const auto wait = std::chrono::nanoseconds(
          due_ns == ~uint64_t{0} ? std::chrono::nanoseconds(std::chrono::hours(1)).count()
                                 : static_cast<int64_t>(due_ns > now ? due_ns - now : 0));
      changed_.wait_for(lock, wait, [&] { return awake_; });
    }
  }
}

void CacheAccess::poll(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  std::array<storage::Transfer*, 32> done{};
  const Result<size_t> count = file_->queue().finish(done, kPollWait);
  lock.lock();
  if (!count.ok()) return give_up(count.status());
  for (size_t i = 0; i < *count; ++i) {
    if (done[i]->op == storage::IoOp::kRead) {
      on_read(*static_cast<CacheChunk*>(done[i]->owner));
    } else {
      on_written(*static_cast<Pending*>(done[i]->owner));
    }
  }
}

void CacheAccess::give_up(Status status) {
  broken_ = std::move(status);
  begin_gathered();
  for (auto attending = attending_.begin(); attending != attending_.end();) {
    Attending& one = *attending++;
    one.status = broken_;
    go_on(one);
  }
}

bool CacheAccess::quiet() const { return to_write_.empty() && file_->queue().in_flight() == 0; }

/// False: the command must wait.
bool CacheAccess::try_serve(Command& command, std::unique_lock<std::mutex>& lock) {
  if (!broken_.ok()) {
    answer(command, broken_);
    return true;
  }
  if (const auto* message = command.as<OpenCache>()) {
    answer(command, open(*message));
    return true;
  }
  if (file_ == nullptr) {
    answer(command, Status(ErrorCode::kFailedPrecondition, "the cache is not open"));
    return true;
  }
  const auto* attends = command.as<Attend>();
  if (attends == nullptr) begin_gathered();
  if (attends != nullptr) {
    attend(command, *attends);
    return true;
  }
  if (const auto* message = command.as<AppendKeysValues>()) return append(command, *message);
  if (const auto* message = command.as<OpenSequence>()) {
    answer(command, open_sequence(*message));
    return true;
  }
  if (const auto* message = command.as<CloseSequence>()) {
    return close_sequence(command, message->id);
  }
  if (const auto* message = command.as<AttendOrder>()) {
    scans_->set_order(message->order);
    answer(command, Status());
    return true;
  }
  waits_for_quiet_ = !quiet() || free_blocks_.empty();
  if (waits_for_quiet_) return false;
  if (const auto* message = command.as<ReadTail>()) {
    answer(command, read_tail(*message), message->block.size());
    return true;
  }
  lock.unlock();  // Nobody else uses the file's tables but to read them.
  Status saved = file_->save();
  lock.lock();
  if (file_->queue().failed()) give_up(saved);
  answer(command, std::move(saved));
  return true;
}

Status CacheAccess::open(const OpenCache& message) {
  SI_RETURN_IF_ERROR(check_shape(message));
  if (file_ != nullptr) {
    return Status(ErrorCode::kFailedPrecondition, "the cache is open already");
  }
  storage::CacheIdentity identity;
  identity.job.bytes = message.job;
  identity.device_index = message.device_index;
  identity.device_count = message.device_count;
  identity.layers = message.layers;
  identity.block_bytes = kernels::cache_block_bytes(message.shape.block);
  identity.block_tokens = kernels::kCacheBlockTokens;
  identity.text = message.identity;
  const LocalDeviceOptions& options = parts_.options;
  const storage::StoreOptions store = linked_store_options(options);
  SI_ASSIGN_OR_RETURN(storage::CachePlace place,
                      options.open_cache_place
                          ? options.open_cache_place(storage::kCacheFileName, store)
                          : storage::open_cache_place(options.path, storage::kCacheFileName,
                                                      storage::kCacheDataOffset, store));
  if (message.afresh) SI_RETURN_IF_ERROR(storage::CacheFile::erase(place));
  shape_ = message.shape;
  SI_ASSIGN_OR_RETURN(folder_, parts_.processor->make_folder(shape_));
  SI_ASSIGN_OR_RETURN(
      file_, storage::CacheFile::open(std::move(place), std::move(identity), options.cache_bytes,
                                      store.watchdog, traffic_));
  if (Status taken = take_memory(); !taken.ok()) {
    file_.reset();
    return taken;
  }
  // One that waits for a processor is enough.
  workers_.emplace(
      "si-attend", [this](Attending* attending) { fold(attending); },
      folder_ != nullptr ? 1 : std::max(1u, options.threads));
  for (size_t i = 0; i < workers_->threads().size() && !options.cores.empty(); ++i) {
    pin_thread(workers_->threads()[i], options.cores[i % options.cores.size()]);
  }
  if (message.saved_sequences != nullptr) *message.saved_sequences = file_->sequences().size();
  return Status();
}

/// Of kCacheWorkBytes, an eighth for blocks that are to be written, the rest for reading; of little
/// memory a quarter, until these are kPendingEnough.
Status CacheAccess::take_memory() {
  const uint64_t block = file_->identity().block_bytes;
  const uint64_t all = parts_.options.cache_memory_bytes;
  const uint64_t work = std::min(all, std::max(kCacheWorkBytes, 4 * block));
  const uint64_t pending =
      std::max({uint64_t{2}, std::min(kPendingEnough, work / 4 / block), work / 8 / block});
  if ((pending + 2) * block > work) {
    return Status(ErrorCode::kOutOfMemory,
                  "four blocks of keys and values take " + base::format_bytes(4 * block) +
                      ", and the device has " + base::format_bytes(all) + " for them",
                  "Give it more memory.");
  }
  const uint64_t left = work - pending * block;
  const uint64_t chunk =
      std::max<uint64_t>(1, std::min(kCacheReadBytesMax, left / kChunksMin) / block) * block;
  const uint64_t chunks = left / chunk;
  SI_ASSIGN_OR_RETURN(memory_, base::AlignedBuffer::allocate(pending * block + chunks * chunk));
  const std::span<std::byte> bytes = memory_.bytes();
  unwritten_max_ = pending;
  kept_max_ = (all - work) / block;
  SI_ASSIGN_OR_RETURN(kept_memory_, base::AlignedBuffer::allocate(kept_max_ * block));
  blocks_ = std::vector<Pending>(pending + kept_max_);
  for (uint64_t i = blocks_.size(); i-- > 0;) {  // those that the ring knows come first
    blocks_[i].memory = i < pending ? bytes.subspan(i * block, block)
                                    : kept_memory_.bytes().subspan((i - pending) * block, block);
    blocks_[i].transfer.owner = &blocks_[i];
    free_blocks_.push_back(&blocks_[i]);
  }
  std::vector<std::span<std::byte>> slots;
  for (uint64_t i = 0; i < chunks; ++i) {
    slots.push_back(bytes.subspan(pending * block + i * chunk, chunk));
  }
  scans_ = std::make_unique<CacheScans>(
      *file_, std::move(slots), cache_reads_at_once(file_->queue().depth()),
      [this](const CachedSequence& sequence, uint32_t layer) { return on_drive(sequence, layer); },
      traffic_);
  if (const Status mapped = file_->queue().ring().register_memory(bytes); !mapped.ok()) {
    base::log(base::LogLevel::kWarning, "device " + parts_.name + ": " + mapped.to_string());
  }
  return Status();
}

// ---- Sequences.

Result<CachedSequence*> CacheAccess::find(uint64_t id) const {
  if (!opened_.contains(id)) return no_sequence(id);
  const auto failed = failed_.find(id);
  if (failed != failed_.end()) return failed->second;
  return file_->find(id);
}

uint64_t CacheAccess::on_drive(const CachedSequence& sequence, uint32_t layer) const {
  const auto pending = pending_of_.find({sequence.id, layer});
  if (pending != pending_of_.end()) return pending->second.front()->place;
  return sequence.layers[layer].sums.size();
}

Status CacheAccess::open_sequence(const OpenSequence& message) {
  if (opened_.contains(message.id)) {
    return Status(ErrorCode::kAlreadyExists,
                  "sequence " + std::to_string(message.id) + " is open already");
  }
  uint64_t saved = 0;
  if (CachedSequence* found = file_->find(message.id); found != nullptr) {
    if (found->tokens_max == message.tokens_max) {
      saved = cut_to_shortest(*found);
      opened_.insert(message.id);
      if (message.saved_tokens != nullptr) *message.saved_tokens = saved;
      return Status();
    }
    file_->remove(message.id);
  }
  if (message.saved_only) return no_sequence(message.id);
  Result<CachedSequence*> added = file_->add(message.id, message.tokens_max);
  if (added.status().code() == ErrorCode::kNoSpace) {
    // Sequences of the last save give way that nobody has taken up so far.
    std::vector<uint64_t> unused;
    for (const auto& [id, sequence] : file_->sequences()) {
      if (!opened_.contains(id)) unused.push_back(id);
    }
    for (const uint64_t id : unused) {
      scans_->forget(*file_->find(id));
      file_->remove(id);
    }
    if (!unused.empty()) added = file_->add(message.id, message.tokens_max);
  }
  SI_RETURN_IF_ERROR(added.status());
  opened_.insert(message.id);
  if (message.saved_tokens != nullptr) *message.saved_tokens = 0;
  return Status();
}

/// False: blocks of it are still to be written.
bool CacheAccess::close_sequence(Command& command, uint64_t id) {
  if (!opened_.contains(id)) {
    answer(command, no_sequence(id));
    return true;
  }
  const auto uses = [&](const Attending& one) {
    const auto asks = [&](const Asked& asked) { return asked.command->as<Attend>()->id == id; };
    return one.sequence->id == id || std::ranges::any_of(one.asked, asks);
  };
  if (std::ranges::any_of(attending_, uses)) {
    answer(command, Status(ErrorCode::kFailedPrecondition,
                           "sequence " + std::to_string(id) + " is being read"));
    return true;
  }
  // Blocks that nobody will read need not be written.
  std::erase_if(to_write_, [&](Pending* pending) {
    if (pending->id != id) return false;
    --unwritten_;
    pending->written = true;
    if (pending->listed) ++kept_;
    release(*pending);
    return true;
  });
  if (std::ranges::any_of(blocks_,
                          [&](const Pending& one) { return one.id == id && !one.written; })) {
    return false;
  }
  CachedSequence& sequence = *file_->find(id);
  for (uint32_t layer = 0; layer < sequence.layers.size(); ++layer) {
    const auto listed = pending_of_.find({id, layer});
    if (listed == pending_of_.end()) continue;
    for (Pending* pending : listed->second) unlist(*pending);
    pending_of_.erase(listed);
  }
  scans_->forget(sequence);
  file_->remove(id);
  opened_.erase(id);
  failed_.erase(id);
  answer(command, Status());
  return true;
}

// ---- Blocks that come.

Status CacheAccess::check_append(const AppendKeysValues& message) const {
  SI_ASSIGN_OR_RETURN(const CachedSequence* sequence, find(message.id));
  const uint64_t blocks = base::divide_up(message.tokens, kBlockTokens);
  if (message.layer >= sequence->layers.size() || message.tokens == 0 ||
      message.tokens > sequence->tokens_max ||
      message.blocks.size() != blocks * file_->identity().block_bytes) {
    return invalid("keys and values of another shape than the cache's");
  }
  const uint64_t there = sequence->layers[message.layer].sums.size() * kBlockTokens;
  if (message.first_token != there || message.tokens > sequence->tokens_max - there) {
    return invalid("sequence " + std::to_string(message.id) + " has blocks of " +
                   std::to_string(there) + " tokens in layer " + std::to_string(message.layer) +
                   " and room for " + std::to_string(sequence->tokens_max) + ", and " +
                   std::to_string(message.tokens) + " from " + std::to_string(message.first_token) +
                   " on do not follow");
  }
  return Status();
}

/// False: there is no memory for all of it yet.
bool CacheAccess::append(Command& command, const AppendKeysValues& message) {
  Status status = copied_blocks_ == 0 ? check_append(message) : find(message.id).status();
  const uint64_t blocks = base::divide_up(message.tokens, kBlockTokens);
  while (status.ok() && copied_blocks_ < blocks) {
    if (free_blocks_.empty()) return false;
    append_block(message, copied_blocks_++);
  }
  copied_blocks_ = 0;
  if (status.ok() && parts_.options.host_link_place != HostLinkPlace::kAtStore) {
    parts_.host_traffic.add_down(base::TrafficKind::kCache, message.blocks.size());
    if (Link* link = parts_.options.links.host.get(); link != nullptr) {
      late_.push_back(
          {&command,
           {},
           link->book(LinkDirection::kDown, base::TrafficKind::kCache, message.blocks.size())});
      return true;
    }
  }
  answer(command, std::move(status));
  return true;
}

/// The sequence is there: it is not closed before the message is done.
void CacheAccess::append_block(const AppendKeysValues& message, uint64_t block) {
  Pending& pending = *free_blocks_.back();
  free_blocks_.pop_back();
  const uint64_t bytes = file_->identity().block_bytes;
  const auto from = message.blocks.subspan(block * bytes, bytes);
  std::memcpy(pending.memory.data(), from.data(), bytes);
  CachedSequence& sequence = *file_->find(message.id);
  CachedLayer& layer = sequence.layers[message.layer];
  const uint64_t tokens = std::min(kBlockTokens, message.tokens - block * kBlockTokens);
  const bool whole = tokens == kBlockTokens;
  if (!whole) layer.tail_place ^= 1;
  pending.id = message.id;
  pending.layer = message.layer;
  pending.place = whole ? layer.sums.size() : file_->blocks(sequence) + layer.tail_place;
  pending.written = false;
  pending.listed = whole;
  const uint64_t sum = file_->checksum(pending.id, pending.layer, pending.place, pending.memory);
  if (whole) {
    layer.sums.push_back(sum);
    pending_of_[{pending.id, pending.layer}].push_back(&pending);
  }
  layer.tail_tokens = whole ? 0 : static_cast<uint32_t>(tokens);
  layer.tail_sum = whole ? 0 : sum;
  to_write_.push_back(&pending);
  ++unwritten_;
}

void CacheAccess::start_writes() {
  const uint32_t depth = std::max(1u, file_->queue().depth() / 4);
  const bool urgent = !commands_.empty() || 2 * unwritten_ > unwritten_max_;
  if (!urgent && scans_->wants()) return;
  while (!to_write_.empty() && writes_in_flight_ < depth) {
    Pending& pending = *to_write_.front();
    to_write_.pop_front();
    pending.transfer.op = storage::IoOp::kWrite;
    pending.transfer.offset_bytes =
        file_->place_offset(*file_->find(pending.id), pending.layer, pending.place);
    pending.transfer.buffer = pending.memory;
    pending.transfer.kind = base::TrafficKind::kCache;
    ++writes_in_flight_;
    file_->queue().start(pending.transfer);
  }
}

void CacheAccess::on_written(Pending& pending) {
  --writes_in_flight_;
  --unwritten_;
  pending.written = true;
  if (pending.transfer.status.ok()) {
    traffic_.add_down(base::TrafficKind::kCache, pending.memory.size());
  } else {
    failed_.try_emplace(
        pending.id,
        Status(pending.transfer.status).with_context("sequence " + std::to_string(pending.id)));
  }
  if (!pending.listed) return release(pending);
  ++kept_;
  keep_some_of({pending.id, pending.layer});
}

/// The block is written.
void CacheAccess::unlist(Pending& pending) {
  pending.listed = false;
  --kept_;
  release(pending);
}

/// Gives up the first blocks of the layer as far as more are kept than there is memory for.
void CacheAccess::keep_some_of(const LayerKey& key) {
  const auto listed = pending_of_.find(key);
  std::deque<Pending*>& list = listed->second;
  while (kept_ > kept_max_ && !list.empty() && list.front()->written) {
    unlist(*list.front());
    list.pop_front();
  }
  if (list.empty()) pending_of_.erase(listed);
}

/// The last blocks of a layer that were read: those of a sequence that was taken up again. Takes no
/// memory from those that are to be written.
void CacheAccess::keep_read(const Attending& attending, const CacheChunk& chunk) {
  const CachedSequence& sequence = *attending.sequence;
  const uint64_t end = attending.next;
  if (kept_ >= kept_max_ || on_drive(sequence, attending.layer) != end) return;
  const uint64_t bytes = file_->identity().block_bytes;
  for (uint64_t block = end; block-- > chunk.first && kept_ < kept_max_;) {
    if (free_blocks_.size() <= unwritten_max_) return;
    Pending& kept = *free_blocks_.back();
    free_blocks_.pop_back();
    std::memcpy(kept.memory.data(), chunk.memory.data() + (block - chunk.first) * bytes, bytes);
    kept.id = sequence.id;
    kept.layer = attending.layer;
    kept.place = block;
    kept.listed = true;
    pending_of_[{kept.id, kept.layer}].push_front(&kept);
    ++kept_;
  }
}

void CacheAccess::release(Pending& pending) {
  if (!pending.written || pending.listed || pending.users > 0) return;
  free_blocks_.push_back(&pending);
  if (!commands_.empty()) wake();
}

Status CacheAccess::read_tail(const ReadTail& message) {
  SI_ASSIGN_OR_RETURN(CachedSequence* const sequence, find(message.id));
  if (message.layer >= sequence->layers.size() ||
      message.block.size() != file_->identity().block_bytes) {
    return invalid("a block of another shape than the cache's");
  }
  const CachedLayer& layer = sequence->layers[message.layer];
  if (message.tokens == 0 || layer.tail_tokens != message.tokens) {
    return Status(ErrorCode::kNotFound, "sequence " + std::to_string(message.id) + " has " +
                                            std::to_string(layer.tail_tokens) +
                                            " tokens behind its whole blocks, not " +
                                            std::to_string(message.tokens));
  }
  const uint64_t place = file_->blocks(*sequence) + layer.tail_place;
  const auto bytes = free_blocks_.back()->memory;
  SI_RETURN_IF_ERROR(file_->queue().run(
      storage::IoOp::kRead, file_->place_offset(*sequence, message.layer, place), bytes, memory_));
  traffic_.add_up(base::TrafficKind::kCache, bytes.size());
  if (file_->checksum(message.id, message.layer, place, bytes) != layer.tail_sum) {
    return file_->damaged(*sequence, message.layer, place);
  }
  std::ranges::copy(bytes, message.block.begin());
  return Status();
}

// ---- Queries.

Status CacheAccess::check_blocks(uint64_t id, uint32_t layer, uint64_t first_token,
                                 uint64_t end_token) const {
  SI_ASSIGN_OR_RETURN(const CachedSequence* sequence, find(id));
  if (layer >= sequence->layers.size()) return invalid("a layer that the cache has not");
  const uint64_t there = sequence->layers[layer].sums.size() * kBlockTokens;
  if (end_token % kBlockTokens == 0 && end_token <= there && first_token <= end_token) {
    return Status();
  }
  return invalid("sequence " + std::to_string(id) + " has blocks of " + std::to_string(there) +
                 " tokens in layer " + std::to_string(layer) + ", and a query asks for " +
                 std::to_string(first_token) + " to " + std::to_string(end_token));
}

Status CacheAccess::check_attend(const Attend& message) const {
  const uint64_t query_bytes = uint64_t{shape_.heads} * shape_.block.head_width * sizeof(float);
  const uint64_t state_bytes = shape_.state_floats() * sizeof(float);
  if (message.query.size() != query_bytes || message.state_out.size() != state_bytes) {
    return invalid("a query of another shape than the cache's");
  }
  if (message.prefix_end_token > 0 && message.prefix_id == message.id) {
    return invalid("a sequence that is its own prefix");
  }
  if (message.prefix_end_token > 0) {
    SI_RETURN_IF_ERROR(check_blocks(message.prefix_id, message.layer, message.prefix_first_token,
                                    message.prefix_end_token));
  }
  return check_blocks(message.id, message.layer, message.first_token, message.end_token);
}

void CacheAccess::attend(Command& command, const Attend& message) {
  if (!gathered_.empty()) {
    const auto& before = *gathered_.front().command->as<Attend>();
    const bool together = message.layer == before.layer && message.prefix_id == before.prefix_id &&
                          message.prefix_end_token == before.prefix_end_token;
    if (!together) begin_gathered();
  }
  if (Status wrong = check_attend(message); !wrong.ok()) {
    if (!message.more) begin_gathered();
    return answer(command, std::move(wrong));
  }
  if (parts_.options.host_link_place != HostLinkPlace::kAtStore) {
    const uint64_t bytes = message.query.size() + message.state_in.size();
    parts_.host_traffic.add_down(base::TrafficKind::kCache, bytes);
    if (Link* link = parts_.options.links.host.get(); link != nullptr) {
      (void)link->book(LinkDirection::kDown, base::TrafficKind::kCache, bytes);
    }
  }
  auto* state = reinterpret_cast<float*>(message.state_out.data());
  if (message.state_in.empty()) {
    kernels::begin_fold(shape_, state);
  } else {
    std::memcpy(state, message.state_in.data(), message.state_in.size());
  }
  const Asked asked{&command,
                    message.prefix_first_token,
                    {reinterpret_cast<const float*>(message.query.data()), state}};
  if (message.prefix_end_token == 0) return begin_own(asked, false);
  gathered_.push_back(asked);
  if (!message.more) begin_gathered();
}

/// Nothing more comes to them.
void CacheAccess::begin_gathered() {
  if (gathered_.empty()) return;
  const std::vector<Asked> all = std::exchange(gathered_, {});
  const auto& message = *all.front().command->as<Attend>();
  begin(message.prefix_id, message.layer, message.prefix_end_token, all);
}

/// A query over its own sequence's blocks.
void CacheAccess::begin_own(const Asked& asked, bool after_prefix) {
  const auto& message = *asked.command->as<Attend>();
  if (after_prefix && message.first_token >= message.end_token) {
    return answer(*asked.command, Status(), message.state_out.size());
  }
  const Asked own{asked.command, message.first_token, asked.query};
  begin(message.id, message.layer, message.end_token, {&own, 1});
}

/// Queries over the same blocks, in as many parts as there are threads.
void CacheAccess::begin(uint64_t id, uint32_t layer, uint64_t end_token,
                        std::span<const Asked> asked) {
  CachedSequence& sequence = *file_->find(id);
  const uint64_t end = end_token / kBlockTokens;
  const uint64_t first =
      std::ranges::min_element(asked, {}, &Asked::first_token)->first_token / kBlockTokens;
  const uint64_t drive_end = std::clamp(on_drive(sequence, layer), first, end);
  const size_t parts = std::min(asked.size(), workers_->threads().size());
  CacheScan* scan = nullptr;
  std::vector<Attending*> begun;
  for (size_t part = 0; part < parts; ++part) {
    Attending& one = attending_.emplace_back();
    const size_t from = part * asked.size() / parts;
    const size_t to = (part + 1) * asked.size() / parts;
    one.asked.assign(asked.begin() + static_cast<ptrdiff_t>(from),
                     asked.begin() + static_cast<ptrdiff_t>(to));
    one.sequence = &sequence;
    one.layer = layer;
    one.next = first;
    one.drive_end = drive_end;
    one.end = end;
    one.status = broken_;
    if (scan != nullptr) {
      scans_->join(*scan, &one);
    } else if (first < drive_end) {
      scan = &scans_->take(sequence, layer, first, drive_end, &one);
    } else {
      scans_->drop_ahead(sequence, layer);
    }
    one.scan = scan;
    if (drive_end < end) {
      for (Pending* pending : pending_of_.at({id, layer})) {
        if (pending->place < drive_end || pending->place >= end) continue;
        ++pending->users;
        one.pending.push_back(pending);
      }
    }
    begun.push_back(&one);
  }
  for (Attending* one : begun) go_on(*one);
}

void CacheAccess::on_read(CacheChunk& chunk) {
  CacheScan* scan = scans_->finished(chunk);
  if (scan == nullptr) return;
  for (void* reader : scan->readers) go_on(*static_cast<Attending*>(reader));
}

bool CacheAccess::can_fold(const Attending& attending) const {
  if (!attending.status.ok() || attending.next >= attending.drive_end) return true;
  const CacheScan& scan = *attending.scan;
  const CacheChunk* chunk = scan.chunk(attending.chunks_used);
  return !scan.status.ok() || (chunk != nullptr && chunk->there);
}

void CacheAccess::go_on(Attending& attending) {
  if (attending.folding || !can_fold(attending)) return;
  attending.folding = true;
  workers_->post(&attending);
}

void CacheAccess::fold(Attending* attending) {
  std::unique_lock lock(mutex_);
  while (attending->status.ok() && attending->next < attending->end) {
    if (!can_fold(*attending)) {
      attending->folding = false;
      return;
    }
    if (attending->next < attending->drive_end) {
      Status folded = fold_chunk(*attending, lock);
      if (attending->status.ok()) attending->status = std::move(folded);
    } else {
      fold_pending(*attending, lock);
    }
  }
  finish(*attending);
}

/// A block into all queries that see tokens of it; those that see the same ones together.
void CacheAccess::fold_block(const Attending& attending, uint64_t block,
                             std::span<const std::byte> memory, const std::byte* next_block) const {
  std::vector<kernels::FoldQuery> queries;
  for (size_t i = 0; i < attending.asked.size(); ++i) {
    const auto range_of = [&](size_t asked) {
      return kernels::range_in_block(block, attending.asked[asked].first_token,
                                     attending.end * kBlockTokens);
    };
    kernels::FoldRange range = range_of(i);
    queries.push_back(attending.asked[i].query);
    if (i + 1 < attending.asked.size() && range_of(i + 1).first == range.first) continue;
    range.next_block = next_block;
    kernels::fold_block(shape_, memory, range, queries);
    queries.clear();
  }
}

Status CacheAccess::fold_by_processor(const Attending& attending, uint64_t first,
                                      std::span<const std::byte> blocks) const {
  std::vector<FoldFrom> queries;
  for (const Asked& asked : attending.asked) queries.push_back({asked.query, asked.first_token});
  return folder_->fold({blocks, first, attending.end * kBlockTokens, queries});
}

Status CacheAccess::fold_chunk(Attending& attending, std::unique_lock<std::mutex>& lock) {
  CacheScan& scan = *attending.scan;
  SI_RETURN_IF_ERROR(scan.status);
  const CacheChunk& chunk = *scan.chunk(attending.chunks_used);
  const uint64_t end = std::min(attending.drive_end, chunk.first + chunk.blocks);
  const auto sums_begin = attending.sequence->layers[attending.layer].sums.begin();
  std::vector<uint64_t> sums;
  for (uint64_t block = attending.next; block < end; ++block) {
    sums.push_back(sums_begin[static_cast<ptrdiff_t>(block)]);
  }
  const uint64_t begin = attending.next;
  lock.unlock();
  const uint64_t bytes = file_->identity().block_bytes;
  Status status;
  for (uint64_t block = begin; block < end && status.ok(); ++block) {
    const auto memory =
        std::span<const std::byte>(chunk.memory).subspan((block - chunk.first) * bytes, bytes);
    if (parts_.options.store.checksums && file_->checksum(attending.sequence->id, attending.layer,
                                                          block, memory) != sums[block - begin]) {
      status = file_->damaged(*attending.sequence, attending.layer, block);
      break;
    }
    if (folder_ != nullptr) continue;
    fold_block(attending, block, memory, block + 1 < end ? memory.data() + bytes : nullptr);
  }
  if (folder_ != nullptr && status.ok() && begin < end) {
    const auto blocks = std::span<const std::byte>(chunk.memory)
                            .subspan((begin - chunk.first) * bytes, (end - begin) * bytes);
    status = fold_by_processor(attending, begin, blocks);
  }
  lock.lock();
  attending.next = std::max(end, begin);
  if (status.ok()) keep_read(attending, chunk);
  scans_->use(scan, attending.chunks_used++);
  wake();
  return status;
}

void CacheAccess::fold_pending(Attending& attending, std::unique_lock<std::mutex>& lock) {
  Pending& pending = *attending.pending.front();
  lock.unlock();
  fold_block(attending, attending.next, pending.memory, nullptr);
  lock.lock();
  ++attending.next;
  attending.pending.pop_front();
  --pending.users;
  release(pending);
}

void CacheAccess::finish(Attending& attending) {
  if (attending.scan != nullptr) {
    scans_->leave(*attending.scan, &attending, attending.chunks_used);
  }
  for (Pending* pending : attending.pending) {
    --pending->users;
    release(*pending);
  }
  const std::vector<Asked> all = std::move(attending.asked);
  const Status status = std::move(attending.status);
  const uint64_t folded = attending.sequence->id;
  attending_.remove_if([&](const Attending& one) { return &one == &attending; });
  for (const Asked& asked : all) {
    const auto& message = *asked.command->as<Attend>();
    if (status.ok() && folded != message.id) {
      begin_own(asked, true);
    } else {
      answer(*asked.command, status, message.state_out.size());
    }
  }
  wake();
}

// ---- Answers.

/// bytes_up: that go up with a good one.
void CacheAccess::answer(Command& command, Status status, uint64_t bytes_up) {
  const bool counted = parts_.options.host_link_place != HostLinkPlace::kAtStore;
  if (status.ok() && bytes_up > 0 && counted) {
    parts_.host_traffic.add_up(base::TrafficKind::kCache, bytes_up);
    if (Link* link = parts_.options.links.host.get(); link != nullptr) {
      late_.push_back({&command, std::move(status),
                       link->book(LinkDirection::kUp, base::TrafficKind::kCache, bytes_up)});
      return wake();
    }
  }
  parts_.complete(command, std::move(status));
}

/// When the next one will be due; ~0: none is late.
uint64_t CacheAccess::answer_late() {
  const uint64_t now = base::now_ns();
  uint64_t due = ~uint64_t{0};
  std::erase_if(late_, [&](Late& late) {
    if (late.due_ns > now) {
      due = std::min(due, late.due_ns);
      return false;
    }
    parts_.complete(*late.command, std::move(late.status));
    return true;
  });
  return due;
}

}  // namespace smartinf::csd
