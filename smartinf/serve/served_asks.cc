#include "smartinf/serve/served_asks.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/serve/command_gate.h"
#include "smartinf/serve/hosted_session.h"
#include "smartinf/serve/protocol_fields.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/row_file.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr double kAskSeconds = 30;  // for a client to say what it asks, and to take an answer
constexpr uint64_t kCheckMemoryMax = uint64_t{64} << 20;
// Subgroups of a new state whose writes are not waited for.
constexpr size_t kWritesMax = 4;

template <typename Message>
bool say(ServedStream& served, const Message& message, Payload payload = {}) {
  const Deadline deadline(served.stream, kAskSeconds);
  const OutFrame frame{encode(message), std::move(payload)};
  served.device.counters().bytes_sent += frame.bytes();
  return served.stream.write(frame);
}

/// Reads the client's next message. Without a bound it waits: a copy of a whole state may pause.
template <typename Message>
Result<Message> hear(ServedStream& served, InFrame& frame, double seconds = 0) {
  std::optional<Deadline> deadline;
  if (seconds > 0) deadline.emplace(served.stream, seconds);
  SI_RETURN_IF_ERROR(served.stream.read(frame));
  served.device.counters().bytes_received += frame.bytes();
  return decode<Message>(frame);
}

void note(const ServedStream& served, const char* what, const Status& status) {
  base::log(status.ok() ? base::LogLevel::kInfo : base::LogLevel::kWarning,
            fmt::format("client {} ({}), device {}: {}{}", served.peer.name, served.peer.address,
                        served.device.name(), what,
                        status.ok() ? std::string() : ": " + status.to_string()));
}

Answer answer_of(Status status, Answer answer) {
  if (status.ok()) return answer;
  return status;
}

class Asked {
 public:
  Asked(ServedStream& served, csd::DeviceSource& source) : served_(served), source_(source) {}

  Answer operator()(const Peek&) {
    auto state = source_.peek();
    if (!state.ok()) return state.status();
    return Peeked{*state};
  }
  Answer operator()(const Summarize&) {
    auto summary = source_.summarize();
    if (!summary.ok()) return summary.status();
    return std::move(*summary);
  }
  Answer operator()(const Check& check) {
    auto lease = served_.device.lease(served_.peer.name);
    if (!lease.ok()) return lease.status();
    note(served_, check.repair ? "repairs the state" : "checks the state", {});
    storage::CheckOptions options;
    options.memory_bytes = std::min(check.memory_bytes, kCheckMemoryMax);
    options.io_depth = std::clamp(check.io_depth, 1u, 64u);
    options.repair = check.repair;
    options.step = check.step;
    bool gone = false;
    options.progress = [&](uint64_t done, uint64_t total) {
      if (!gone) gone = !say(served_, Answer(Progress{done, total}));
      return gone ? Status(ErrorCode::kCancelled, "the client is gone") : Status();
    };
    auto report = source_.check(options, [&](const storage::StoreFault& fault) {
      if (!gone) gone = !say(served_, Answer(fault));
    });
    if (!report.ok()) return report.status();
    return *report;
  }
  /// Measuring writes: nobody else may be using it.
  Answer operator()(const Measure&) {
    const auto session = served_.device.session();
    Result<DeviceLease> lease = served_.device.lease(served_.peer.name);
    const bool his = session != nullptr && served_.device.holder() == served_.peer.name;
    if (!lease.ok() && !his) return lease.status();
    auto rate = source_.bandwidth();
    if (!rate.ok()) return rate.status();
    return Measured{*rate};
  }
  Answer operator()(const Capacity&) {
    auto bytes = source_.capacity_bytes();
    if (!bytes.ok()) return bytes.status();
    const uint64_t quota = served_.device.served().quota_bytes;
    return Capable{quota == 0 ? *bytes : std::min(*bytes, quota)};
  }
  Answer operator()(const Describe&) {
    return Described{served_.device.name(), source_.drive(), source_.keeps_replaced()};
  }
  Answer operator()(const Erase&) {
    auto lease = served_.device.lease(served_.peer.name);
    if (!lease.ok()) {
      // Its own session that made a new state and was killed: nothing is lost with it.
      const auto state = source_.peek();
      if (state.ok() && *state && !(*state)->initialized &&
          session_gives_way(served_.device, served_.peer)) {
        lease = served_.device.lease(served_.peer.name);
        const auto left = source_.peek();
        if (lease.ok() && left.ok() && !*left) return Erased{};  // with the session
      }
    }
    if (!lease.ok()) return lease.status();
    const Status status = source_.erase();
    note(served_, "erased", status);
    return answer_of(status, Erased{});
  }

 private:
  ServedStream& served_;
  csd::DeviceSource& source_;
};

}  // namespace

void serve_ask(ServedStream& served) {
  InFrame frame;
  auto asked = hear<Ask>(served, frame, kAskSeconds);
  if (!asked.ok()) return;
  auto source = served.device.served().source({});
  const Answer answer =
      source.ok() ? std::visit(Asked(served, **source), *asked) : Answer(source.status());
  (void)say(served, answer);
}

namespace {

/// Whether a client's rows are a table's. payload_bytes: of their records.
Status check_rows(const storage::RowFileLayout& layout, uint32_t table,
                  std::span<const uint32_t> rows) {
  const bool there = table < layout.tables.size() && !rows.empty() &&
                     rows.size() <= kRowsOfAskMax && rows.back() < layout.tables[table].rows &&
                     std::ranges::adjacent_find(rows, std::greater_equal()) == rows.end();
  return there
             ? Status()
             : Status(ErrorCode::kInvalidArgument, "rows of a table that the state does not have");
}

/// The payload of an answer to ReadRows.
Status read_table(csd::RowSnapshot* rows, const ReadRows& asked, std::vector<std::byte>& out) {
  if (rows == nullptr) return Status(ErrorCode::kFailedPrecondition, "no tables are open");
  SI_RETURN_IF_ERROR(check_rows(rows->layout(), asked.table, asked.rows));
  const size_t count = asked.rows.size();
  const uint64_t record = rows->layout().tables[asked.table].record_bytes;
  if (count > 1 && count * (record + 1) > kPieceBytes) {
    return Status(ErrorCode::kInvalidArgument, "more rows than go in a frame");
  }
  std::vector<std::byte> records(count * record);
  out.assign(count, std::byte{0});
  SI_RETURN_IF_ERROR(
      rows->read(asked.table, asked.rows, [&](size_t i, std::span<const std::byte> stored) {
        if (stored.empty()) return;
        out[i] = std::byte{1};
        std::ranges::copy(stored, records.begin() + static_cast<ptrdiff_t>(i * record));
      }));
  for (size_t i = 0; i < count; ++i) {
    if (out[i] != std::byte{1}) continue;
    const auto at = records.begin() + static_cast<ptrdiff_t>(i * record);
    out.insert(out.end(), at, at + static_cast<ptrdiff_t>(record));
  }
  return Status();
}

}  // namespace

void serve_snapshot(ServedStream& served) {
  InFrame frame;
  auto wanted = hear<OpenSnapshot>(served, frame, kAskSeconds);
  if (!wanted.ok()) return;
  // A client that has the device open reads beside it; else it is leased for as long as it is read.
  const auto session = served.device.session();
  const bool his = session != nullptr && served.device.holder() == served.peer.name &&
                   session->client().name == served.peer.name;
  const bool beside = his && wanted->session && *wanted->session == session->id();
  std::optional<DeviceLease> lease;
  std::unique_ptr<csd::Snapshot> snapshot;
  SnapshotOpened opened;
  Status status;
  if (beside) {
    auto made = session->snapshot();
    status = made.status();
    if (made.ok()) snapshot = std::move(*made);
  } else if (auto taken = served.device.lease(served.peer.name); !taken.ok()) {
    status = taken.status();
  } else {
    lease = std::move(*taken);
    auto source = served.device.served().source({});
    status = source.status();
    if (status.ok()) {
      auto made = (*source)->snapshot(wanted->lock);
      status = made.status();
      if (made.ok()) snapshot = std::move(*made);
    }
  }
  note(served, "reads the state", status);
  opened.outcome = status;
  if (status.ok()) {
    opened.state = snapshot->state();
    opened.layout = snapshot->layout();
    opened.drive = snapshot->drive();
  }
  if (!say(served, opened) || !status.ok()) return;

  bool chosen = false;
  csd::RowSnapshot* rows = nullptr;  // after OpenRows, of a state that has tables
  const storage::StoreLayout& layout = snapshot->layout();
  for (;;) {
    auto asked = hear<SnapshotAsk>(served, frame);
    if (!asked.ok()) return;
    SnapshotAnswer answer;
    Payload payload;
    if (const auto* choose = std::get_if<ChooseStep>(&*asked)) {
      status = chosen ? Status(ErrorCode::kFailedPrecondition, "a step is chosen once")
                      : snapshot->choose_step(choose->step);
      chosen = chosen || status.ok();
      if (status.ok()) answer.client_metadata = snapshot->client_metadata();
    } else if (std::holds_alternative<OpenRows>(*asked)) {
      status = chosen ? Status() : Status(ErrorCode::kFailedPrecondition, "no step is chosen");
      if (status.ok()) {
        auto tables = snapshot->tables();
        status = tables.status();
        if (status.ok() && *tables != nullptr) answer.tables = (*tables)->layout();
        rows = status.ok() ? *tables : nullptr;
      }
    } else if (const auto* read_rows = std::get_if<ReadRows>(&*asked)) {
      auto memory = std::make_shared<std::vector<std::byte>>();
      status = read_table(rows, *read_rows, *memory);
      if (status.ok()) {
        answer.checksum = base::checksum(*memory);
        const std::span<const std::byte> view(*memory);
        payload = {std::move(memory), view};
      }
    } else {
      const auto& read = std::get<ReadBlocks>(*asked);
      status = Status(ErrorCode::kInvalidArgument, "blocks that the state does not have");
      if (chosen && read.subgroup < layout.subgroups.size() && read.plane < layout.planes.size()) {
        const uint64_t elements = layout.subgroups[read.subgroup].count;
        const uint64_t blocks = base::divide_up(elements, base::kBlockElements);
        const base::Encoding encoding =
            base::plane_encoding(layout.format, layout.planes[read.plane]);
        const uint64_t block_bytes = base::encoded_bytes(encoding, base::kBlockElements);
        if (read.count > 0 && read.first < blocks && read.count <= blocks - read.first &&
            read.count <= std::max<uint64_t>(1, kPieceBytes / block_bytes)) {
          const uint64_t first = read.first * base::kBlockElements;
          const uint64_t last = std::min(elements, first + read.count * base::kBlockElements);
          uint64_t bytes = (read.count - 1) * block_bytes;
          bytes +=
              base::encoded_bytes(encoding, last - first - (read.count - 1) * base::kBlockElements);
          auto memory = std::make_shared<std::vector<std::byte>>(bytes);
          status =
              snapshot->read_blocks(read.subgroup, read.plane, read.first, read.count, *memory);
          if (status.ok()) {
            answer.checksum = base::checksum(*memory);
            const std::span<const std::byte> view(*memory);
            payload = {std::move(memory), view};
          }
        }
      }
      answer.blocks_without_checksum = snapshot->blocks_without_checksum();
    }
    answer.outcome = status;
    if (!say(served, answer, std::move(payload))) return;
  }
}

namespace {

/// A state on its way onto a device.
class ServedNewState {
 public:
  ServedNewState(ServedStream& served, storage::Geometry geometry, storage::StoreLayout layout)
      : served_(served), geometry_(std::move(geometry)), layout_(std::move(layout)) {}
  /// Closes the state, also where the stream ends without its having been finished.
  ~ServedNewState() {
    if (state_ == nullptr) return;
    if (state_->close().ok()) return;
    // The drive may still read from it.
    for (auto& [subgroup, write] : writes_) (void)write.release();
  }

  void set_state(std::unique_ptr<csd::NewState> state) { state_ = std::move(state); }

  /// Null: nothing is answered.
  std::optional<Status> take(const StateAsk& asked, const InFrame& frame) {
    if (const auto* piece = std::get_if<SubgroupPiece>(&asked)) {
      if (failed_.ok()) failed_ = take_piece(*piece, frame);
      return std::nullopt;
    }
    if (!failed_.ok()) return failed_;
    if (const auto* wait = std::get_if<WaitFor>(&asked)) return wait_for(wait->subgroup);
    if (assembling_ != nullptr || !writes_.empty()) {
      return Status(ErrorCode::kFailedPrecondition, "writes that were not waited for");
    }
    if (const auto* create = std::get_if<CreateTables>(&asked)) return create_tables(*create);
    if (const auto* put = std::get_if<PutTableRows>(&asked)) return put_rows(*put, frame);
    const auto after = [&](Phase phase, Phase next, auto act) {
      if (phase_ != phase) {
        return Status(ErrorCode::kFailedPrecondition, "a new state's steps in another order");
      }
      Status status = act();
      if (status.ok()) phase_ = next;
      return status;
    };
    if (const auto* prepare = std::get_if<PrepareState>(&asked)) {
      if (prepare->client_metadata.size() > storage::Store::kClientMetadataBytesMax ||
          written_.size() != layout_.subgroups.size()) {
        return Status(ErrorCode::kInvalidArgument, "a state that is not whole");
      }
      return after(Phase::kWriting, Phase::kPrepared,
                   [&] { return state_->prepare(prepare->client_metadata); });
    }
    if (std::holds_alternative<CommitState>(asked)) {
      return after(Phase::kPrepared, Phase::kCommitted, [&] { return state_->commit(); });
    }
    if (std::holds_alternative<CloseState>(asked)) {
      const Status status = state_->close();
      if (phase_ == Phase::kCommitted && status.ok()) phase_ = Phase::kClosed;
      // A state that is given up gets nothing more.
      if (phase_ < Phase::kCommitted) phase_ = Phase::kGivenUp;
      return status;
    }
    if (std::holds_alternative<TakePlace>(asked)) {
      return after(Phase::kClosed, Phase::kPlaced, [&] { return state_->take_place(); });
    }
    if (std::holds_alternative<GiveBack>(asked)) {
      return after(Phase::kPlaced, Phase::kClosed, [&] { return state_->give_back(); });
    }
    return after(Phase::kPlaced, Phase::kFinished, [&] { return state_->finish(); });
  }

 private:
  enum class Phase : uint8_t {
    kWriting,
    kPrepared,
    kCommitted,
    kClosed,
    kPlaced,
    kFinished,
    kGivenUp
  };
  struct Write {
    csd::SubgroupWrite write;
    base::AlignedBuffer memory;
    Charge charge;
    uint64_t came = 0;
  };

  Status take_piece(const SubgroupPiece& piece, const InFrame& frame) {
    const Status wrong(ErrorCode::kInvalidArgument, "a piece of a subgroup that does not fit");
    if (phase_ != Phase::kWriting || piece.subgroup >= layout_.subgroups.size()) return wrong;
    const uint64_t bytes =
        base::round_up(geometry_.extent_bytes(piece.subgroup), base::kIoAlignment);
    if (assembling_ == nullptr) {
      if (piece.offset_bytes != 0 || piece.total_bytes != bytes ||
          written_.contains(piece.subgroup) || writes_.size() >= kWritesMax) {
        return wrong;
      }
      auto write = std::make_unique<Write>();
      write->charge = Charge(served_.device.memory(), bytes);
      if (!write->charge.taken()) {
        return Status(ErrorCode::kOutOfMemory,
                      fmt::format("a subgroup of {} is too much for what device {} may use",
                                  base::format_bytes(bytes), served_.device.name()),
                      "Raise the device's memory in the server's file, or copy with smaller "
                      "subgroups.");
      }
      SI_ASSIGN_OR_RETURN(write->memory, base::AlignedBuffer::allocate(bytes));
      write->write.subgroup = piece.subgroup;
      write->write.memory = write->memory.bytes().first(bytes);
      assembling_ = std::move(write);
    }
    Write& write = *assembling_;
    const uint64_t here = frame.payload_bytes();
    if (piece.subgroup != write.write.subgroup || piece.offset_bytes != write.came || here == 0 ||
        here > bytes - write.came) {
      return wrong;
    }
    const auto out = write.write.memory.subspan(write.came, here);
    if (frame.copy_payload(out, write.came) != piece.checksum) {
      return Status(ErrorCode::kCorrupt, "a subgroup's state came damaged", "Try again.");
    }
    write.came += here;
    if (write.came < bytes) return Status();
    written_.insert(piece.subgroup);
    Write& started = *(writes_[piece.subgroup] = std::exchange(assembling_, nullptr));
    state_->start(started.write);
    return Status();
  }

  /// Within the client's quota, with the state itself.
  Status create_tables(const CreateTables& create) {
    if (phase_ != Phase::kWriting || tables_) {
      return Status(ErrorCode::kFailedPrecondition, "a new state's steps in another order");
    }
    const storage::RowFileLayout& layout = create.layout;
    if (!(layout.run == layout_.run) || layout.device_index != layout_.device_index ||
        layout.device_count != layout_.device_count) {
      return Status(ErrorCode::kInvalidArgument, "tables of another state");
    }
    SI_RETURN_IF_ERROR(
        check_tables(layout, geometry_.container_bytes(), served_.device.served().quota_bytes));
    SI_RETURN_IF_ERROR(state_->create_tables(layout, create.sparse));
    tables_ = layout;
    return Status();
  }

  Status put_rows(const PutTableRows& put, const InFrame& frame) {
    if (phase_ != Phase::kWriting || !tables_) {
      return Status(ErrorCode::kFailedPrecondition, "rows of tables that were not made");
    }
    SI_RETURN_IF_ERROR(check_rows(*tables_, put.table, put.rows));
    const uint64_t bytes = put.rows.size() * tables_->tables[put.table].record_bytes;
    if (frame.payload_bytes() != bytes) {
      return Status(ErrorCode::kInvalidArgument, "records of another size than the table's");
    }
    std::vector<std::byte> records(bytes);
    if (frame.copy_payload(records, 0) != put.checksum) {
      return Status(ErrorCode::kCorrupt, "rows of a table came damaged", "Try again.");
    }
    return state_->put_rows(put.table, put.rows, records);
  }

  Status wait_for(uint64_t subgroup) {
    const auto found = writes_.find(subgroup);
    if (found == writes_.end()) {
      return Status(ErrorCode::kInvalidArgument, "a write that was not begun");
    }
    Status status = state_->wait(found->second->write);
    // Unless the drive still has it.
    if (!found->second->write.under_way) writes_.erase(found);
    return status;
  }

  ServedStream& served_;
  const storage::Geometry geometry_;
  const storage::StoreLayout layout_;
  std::unique_ptr<Write> assembling_;
  std::map<uint64_t, std::unique_ptr<Write>> writes_;
  std::set<uint64_t> written_;
  Phase phase_ = Phase::kWriting;
  std::optional<storage::RowFileLayout> tables_;
  Status failed_;
  std::unique_ptr<csd::NewState> state_;
};

}  // namespace

void serve_new_state(ServedStream& served) {
  InFrame frame;
  auto wanted = hear<CreateState>(served, frame, kAskSeconds);
  if (!wanted.ok()) return;
  auto lease = served.device.lease(served.peer.name);
  Status status = lease.status();
  const uint64_t quota = served.device.served().quota_bytes;
  if (status.ok()) {
    status = check_layout(wanted->layout, wanted->durability, 0, quota > 0 ? quota : ~uint64_t{0});
  }
  std::optional<ServedNewState> made;
  if (status.ok()) {
    const uint32_t slots = wanted->durability == storage::Durability::kNone ? 1 : 2;
    auto geometry = storage::Geometry::make(wanted->layout, slots);
    auto source = served.device.served().source({});
    status = geometry.ok() ? source.status() : geometry.status();
    if (status.ok()) {
      made.emplace(served, std::move(*geometry), wanted->layout);
      auto state = (*source)->create_state(wanted->layout, {wanted->durability, wanted->replace});
      status = state.status();
      if (status.ok()) made->set_state(std::move(*state));
    }
  }
  note(served, "brings a new state", status);
  if (!say(served, StateAnswer{status}) || !status.ok()) return;
  for (;;) {
    auto asked = hear<StateAsk>(served, frame);
    if (!asked.ok()) return;
    const std::optional<Status> answer = made->take(*asked, frame);
    if (answer && !say(served, StateAnswer{*answer})) return;
  }
}

}  // namespace smartinf::serve::wire
