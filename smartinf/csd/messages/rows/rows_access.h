// The row tables of a local device: their file, a cache of rows, and a thread that carries out one
// message after another. Merging the log goes on while no message waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "smartinf/csd/beside_access.h"
#include "smartinf/csd/messages/rows/row_cache.h"
#include "smartinf/csd/messages/rows/rows.h"
#include "smartinf/plan/row_schedule.h"

namespace smartinf::csd {

/// Its thread starts with the first message.
class RowsAccess final : public BesideAccess {
 public:
  explicit RowsAccess(DeviceParts& parts) : parts_(parts) {}
  /// Answers all messages.
  ~RowsAccess() override;

  bool serves(const Command& command) const override { return is_rows_message(command.message); }
  void serve(Command& command, base::Status refusal) override;
  base::TrafficReading traffic() const override { return traffic_.read(); }

  void begin_step(base::StepNumber step) override;
  base::Result<std::string> prepare(base::StepNumber step) override;
  base::Status commit(base::StepNumber step) override;
  base::Status abort(base::StepNumber step) override;
  std::unique_ptr<RowSnapshot> rows_snapshot() override;

  // Of a family that uses the device's I/O thread and its store.
  bool took(storage::SubgroupIo&) override { return false; }
  bool moving() const override { return false; }
  bool idle() const override { return true; }
  void abandon(const base::Status&) override {}
  void on_time(uint64_t) override {}
  uint64_t next_due_ns() const override { return ~uint64_t{0}; }

 private:
  struct Table {
    TableShape shape;
    uint32_t record_bytes = 0;
    plan::RowPlacement placement;
    uint64_t rows = 0;  // here
    std::unique_ptr<RowCache> cache;
    std::vector<uint32_t> updated;  // in this step
    /// Of a table that catches up: the scalars of every step that updated it, in order; how many of
    /// them are committed; and the table of the file that keeps them.
    std::vector<kernels::RowScalars> steps;
    uint64_t committed_steps = 0;
    uint32_t steps_table = 0;
  };
  void run();
  base::Status carry_out(const Command& command);
  base::Status open(const OpenTables& message);
  base::Result<storage::CachePlace> open_place(std::string_view name, uint64_t bytes) const;
  base::Status replace(storage::RowFileLayout layout);
  base::Status take_replacement(base::StepNumber step);
  base::Status read_steps();
  base::Result<Table*> find(uint32_t table);
  static base::Status check_rows(const Table& table, std::span<const std::byte> rows,
                                 size_t values_bytes, uint64_t row_bytes);
  base::Status gather(const GatherRows& message);
  base::Status prefetch(const PrefetchRows& message);
  base::Status update(const UpdateRows& message);
  base::Status put(const PutRows& message);
  base::Status scatter_add(const ScatterAddRows& message);
  base::Status read_records(const ReadRecords& message);

  /// Hands every row's record as the last of `steps` has left it to visit(position in rows,
  /// record), in any order; those that are not cached are read, and cached unless there is no room.
  template <typename Visit>
  base::Status for_each_record(Table& table, std::span<const uint32_t> rows,
                               std::span<const kernels::RowScalars> steps, plan::RowUse use,
                               const Visit& visit);
  void begin_record(const Table& table, uint32_t row, std::span<const std::byte> stored,
                    std::span<std::byte> record) const;
  bool writable(const Table& table) const;
  std::unique_lock<std::mutex> between_messages();
  void pass_host_link(LinkDirection direction, base::TrafficKind kind, uint64_t bytes);

  DeviceParts& parts_;
  base::TrafficCounter traffic_;

  std::mutex queue_mutex_;  // of the commands
  std::condition_variable changed_;
  bool closing_ = false;
  std::deque<Command*> commands_;

  /// Steps of the device's thread that wait for a message to end.
  std::atomic<int> steps_waiting_ = 0;
  std::mutex work_mutex_;  // of everything below
  std::unique_ptr<storage::RowFile> file_;
  std::unique_ptr<storage::RowFile> next_file_;  // takes file_'s place with the step that has begun
  std::string next_record_;                      // that file's
  std::vector<Table> tables_;
  std::string committed_record_;  // the row file's, of the committed step, when it was opened
  base::StepNumber step_ = 0;     // that has begun
  bool begun_ = false;
  bool updating_ = false;      // an update of the step that has begun has come
  bool first_ = false;         // there is no committed step
  base::Status step_failure_;  // of the step that has begun

  std::jthread thread_;
};

}  // namespace smartinf::csd
