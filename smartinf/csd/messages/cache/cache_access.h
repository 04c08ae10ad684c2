// The cache of a local device: its file, a thread that reads, writes and takes messages, and
// threads that fold. All memory is taken when the cache is opened.
//
// A query is folded by one thread at a time, block after block in the order of its tokens: those
// that the drive has as they are read, each right after its checksum was verified, and behind them
// those that wait in memory to be written; first all of a prefix, then those of its own sequence.
// Queries that come together over one prefix share its reads, and are divided among the threads.
// Blocks are written when no query waits for a read, or when half of the memory for them is in use.
// Memory beyond kCacheWorkBytes keeps blocks that the drive has, too: of each layer of a sequence
// the last ones, which are folded from there and not read again until others need the place.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/status.h"
#include "smartinf/base/worker.h"
#include "smartinf/csd/beside_access.h"
#include "smartinf/csd/messages/cache/cache_scans.h"
#include "smartinf/storage/cache_file.h"

namespace smartinf::csd {

/// Its threads start with the first message.
class CacheAccess final : public BesideAccess {
 public:
  explicit CacheAccess(DeviceParts& parts) : parts_(parts) {}
  /// Answers all messages.
  ~CacheAccess() override;

  bool serves(const Command& command) const override;
  void serve(Command& command, base::Status refusal) override;
  base::TrafficReading traffic() const override { return traffic_.read(); }

  // Of a family that uses the device's I/O thread and its store.
  bool took(storage::SubgroupIo&) override { return false; }
  bool moving() const override { return false; }
  bool idle() const override { return true; }
  void abandon(const base::Status&) override {}
  void on_time(uint64_t) override {}
  uint64_t next_due_ns() const override { return ~uint64_t{0}; }

 private:
  /// A block that is to be written, or is kept; a tail's place lies behind those of whole blocks.
  struct Pending {
    std::span<std::byte> memory;
    storage::Transfer transfer;  // owner: this
    uint64_t id = 0;
    uint32_t layer = 0;
    uint64_t place = 0;
    uint32_t users = 0;   // folds that read it
    bool listed = false;  // in pending_of_
    bool written = true;
  };
  using LayerKey = std::pair<uint64_t, uint32_t>;  // sequence, layer

  /// A query with the first of its tokens in the sequence that is folded.
  struct Asked {
    Command* command = nullptr;
    uint64_t first_token = 0;
    kernels::FoldQuery query;
  };
  /// Queries that are folded together over blocks of one sequence.
  struct Attending {
    std::vector<Asked> asked;
    const storage::CachedSequence* sequence = nullptr;
    uint32_t layer = 0;
    CacheScan* scan = nullptr;
    uint64_t chunks_used = 0;                   // of the scan
    uint64_t next = 0, drive_end = 0, end = 0;  // blocks: next to be folded; [next, drive_end) read
    std::deque<Pending*> pending;               // [drive_end, end)
    bool folding = false;
    base::Status status;
  };
  struct Late {
    Command* command = nullptr;
    base::Status status;
    uint64_t due_ns = 0;
  };

  // On the cache's thread, with the lock.
  void run();
  bool try_serve(Command& command, std::unique_lock<std::mutex>& lock);
  base::Status open(const OpenCache& message);
  base::Status take_memory();
  base::Status open_sequence(const OpenSequence& message);
  bool close_sequence(Command& command, uint64_t id);
  bool append(Command& command, const AppendKeysValues& message);
  base::Status check_append(const AppendKeysValues& message) const;
  void append_block(const AppendKeysValues& message, uint64_t block);
  base::Status read_tail(const ReadTail& message);
  base::Status check_blocks(uint64_t id, uint32_t layer, uint64_t first_token,
                            uint64_t end_token) const;
  base::Status check_attend(const Attend& message) const;
  void attend(Command& command, const Attend& message);
  void begin_gathered();
  void begin(uint64_t id, uint32_t layer, uint64_t end_token, std::span<const Asked> asked);
  void begin_own(const Asked& asked, bool after_prefix);
  void start_writes();
  void poll(std::unique_lock<std::mutex>& lock);
  void on_written(Pending& pending);
  void on_read(CacheChunk& chunk);
  void give_up(base::Status status);
  uint64_t answer_late();
  bool quiet() const;
  base::Result<storage::CachedSequence*> find(uint64_t id) const;
  uint64_t on_drive(const storage::CachedSequence& sequence, uint32_t layer) const;

  // On those that fold, or on the cache's.
  void fold(Attending* attending);
  void fold_block(const Attending& attending, uint64_t block, std::span<const std::byte> memory,
                  const std::byte* next_block) const;
  base::Status fold_by_processor(const Attending& attending, uint64_t first,
                                 std::span<const std::byte> blocks) const;
  base::Status fold_chunk(Attending& attending, std::unique_lock<std::mutex>& lock);
  void fold_pending(Attending& attending, std::unique_lock<std::mutex>& lock);
  bool can_fold(const Attending& attending) const;
  void go_on(Attending& attending);
  void finish(Attending& attending);
  void answer(Command& command, base::Status status, uint64_t bytes_up = 0);
  void unlist(Pending& pending);
  void keep_some_of(const LayerKey& key);
  void keep_read(const Attending& attending, const CacheChunk& chunk);
  void release(Pending& pending);
  void wake();

  DeviceParts& parts_;
  base::TrafficCounter traffic_;

  std::mutex mutex_;  // of everything below
  std::condition_variable changed_;
  bool awake_ = false;
  bool closing_ = false;
  base::Status broken_;            // the ring cannot go on
  std::deque<Command*> commands_;  // not yet begun
  uint64_t copied_blocks_ = 0;     // of the AppendKeysValues that is the first of them
  bool waits_for_quiet_ = false;   // the first of them needs a drive that does nothing

  kernels::AttentionShape shape_;
  std::unique_ptr<Folder>
      folder_;                  // of what the drive has; null: workers_, which also fold the rest
  base::AlignedBuffer memory_;  // the drive's as well
  base::AlignedBuffer kept_memory_;  // for kept_max_ more blocks; becomes resident as they come
  std::unique_ptr<storage::CacheFile> file_;
  std::unique_ptr<CacheScans> scans_;
  std::set<uint64_t> opened_;  // sequences; others were saved and nobody asked for them
  std::map<uint64_t, base::Status> failed_;
  std::vector<Pending> blocks_;  // all memory for blocks that are to be written, or kept
  std::vector<Pending*> free_blocks_;
  // Whole blocks in memory, the last ones of each; none is empty.
  std::map<LayerKey, std::deque<Pending*>> pending_of_;
  std::deque<Pending*> to_write_;
  uint64_t unwritten_ = 0;      // blocks
  uint64_t unwritten_max_ = 0;  // twice as many as may wait for a pause of the readers
  uint64_t kept_ = 0;           // blocks that are written and listed
  uint64_t kept_max_ = 0;
  uint32_t writes_in_flight_ = 0;
  std::list<Attending> attending_;
  std::vector<Asked> gathered_;  // that more are to come to, of one layer and prefix
  std::vector<Late> late_;  // on the host link

  std::optional<base::Worker<Attending*>> workers_;
  std::jthread thread_;
};

}  // namespace smartinf::csd
