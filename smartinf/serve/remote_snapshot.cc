#include "smartinf/serve/remote_snapshot.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/serve/said_state.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/row_file.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

/// Rows of so many bytes that go in one frame.
uint64_t rows_at_once(uint32_t record_bytes) {
  return std::clamp<uint64_t>(kPieceBytes / (record_bytes + 1), 1, kRowsOfAskMax);
}

class RemoteRows final : public csd::RowSnapshot {
 public:
  RemoteRows(Conversation& talk, storage::RowFileLayout layout)
      : talk_(talk), layout_(std::move(layout)) {}

  const storage::RowFileLayout& layout() const override { return layout_; }
  Result<uint64_t> clone_to(const std::string&) override { return uint64_t{0}; }

  Status read(uint32_t table, std::span<const uint32_t> rows, const Visit& visit) override {
    const uint32_t record = layout_.tables[table].record_bytes;
    std::vector<std::byte> all;
    for (size_t first = 0; first < rows.size();) {
      const size_t some = std::min<size_t>(rows_at_once(record), rows.size() - first);
      const auto asked = rows.subspan(first, some);
      InFrame frame;
      SI_ASSIGN_OR_RETURN(
          const SnapshotAnswer answer,
          talk_.ask<SnapshotAnswer>(SnapshotAsk(ReadRows{table, {asked.begin(), asked.end()}}), {},
                                    &frame));
      all.resize(frame.payload_bytes());
      const bool sound = frame.copy_payload(all, 0) == answer.checksum && all.size() >= some;
      const auto written = static_cast<size_t>(std::count(
          all.begin(), all.begin() + static_cast<ptrdiff_t>(sound ? some : 0), std::byte{1}));
      if (!sound || all.size() != some + written * record) {
        return talk_.named(Status(ErrorCode::kCorrupt,
                                  "rows of a table are not what the server sent",
                                  "They were damaged on their way or in a memory: try again."));
      }
      std::span<const std::byte> records = std::span(all).subspan(some);
      for (size_t i = 0; i < some; ++i) {
        if (all[i] != std::byte{1}) {
          visit(first + i, {});
          continue;
        }
        visit(first + i, records.first(record));
        records = records.subspan(record);
      }
      first += some;
    }
    return Status();
  }

 private:
  Conversation& talk_;
  const storage::RowFileLayout layout_;
};

class RemoteSnapshot final : public csd::Snapshot {
 public:
  RemoteSnapshot(std::string name, Conversation talk, SnapshotOpened opened)
      : name_(std::move(name)), talk_(std::move(talk)), opened_(std::move(opened)) {}

  const std::string& name() const override { return name_; }
  const storage::StoreState& state() const override { return opened_.state; }
  const storage::StoreLayout& layout() const override { return opened_.layout; }
  std::string drive() const override { return opened_.drive; }
  Status choose_step(base::StepNumber step) override {
    SI_ASSIGN_OR_RETURN(const SnapshotAnswer answer, ask(ChooseStep{step}, nullptr));
    client_metadata_ = answer.client_metadata;
    return Status();
  }
  std::string client_metadata() const override { return client_metadata_; }
  Result<csd::RowSnapshot*> tables() override {
    if (!rows_opened_) {
      SI_ASSIGN_OR_RETURN(SnapshotAnswer answer, ask(OpenRows{}, nullptr));
      if (answer.tables) {
        const Status sound = storage::RowFile::check(*answer.tables);
        if (!sound.ok()) return talk_.named(sound);
        rows_ = std::make_unique<RemoteRows>(talk_, std::move(*answer.tables));
      }
      rows_opened_ = true;
    }
    return rows_.get();
  }
  uint64_t blocks_without_checksum() const override { return blocks_without_checksum_; }

  Status read_blocks(size_t subgroup, size_t plane, uint64_t first, uint64_t count,
                     std::span<std::byte> out) override {
    // An answer is a frame; its blocks are as large as the encoding makes them, the last one
    // smaller.
    const base::Encoding encoding =
        base::plane_encoding(opened_.layout.format, opened_.layout.planes[plane]);
    const uint64_t block_bytes = base::encoded_bytes(encoding, base::kBlockElements);
    const uint64_t at_once = std::max<uint64_t>(1, kPieceBytes / block_bytes);
    for (uint64_t done = 0; done < count;) {
      const uint64_t some = std::min(at_once, count - done);
      const uint64_t at = done * block_bytes;
      const std::span<std::byte> here =
          done + some < count ? out.subspan(at, some * block_bytes) : out.subspan(at);
      InFrame frame;
      SI_ASSIGN_OR_RETURN(const SnapshotAnswer answer,
                          ask(ReadBlocks{subgroup, plane, first + done, some}, &frame));
      if (frame.payload_bytes() != here.size() || frame.copy_payload(here, 0) != answer.checksum) {
        return talk_.named(Status(ErrorCode::kCorrupt,
                                  "blocks of the state are not what the server sent",
                                  "They were damaged on their way or in a memory: try again."));
      }
      blocks_without_checksum_ = answer.blocks_without_checksum;
      done += some;
    }
    return Status();
  }

 private:
  template <typename Asked>
  Result<SnapshotAnswer> ask(const Asked& question, InFrame* frame) {
    return talk_.ask<SnapshotAnswer>(SnapshotAsk(question), {}, frame);
  }

  const std::string name_;
  Conversation talk_;
  const SnapshotOpened opened_;
  std::string client_metadata_;
  bool rows_opened_ = false;
  std::unique_ptr<RemoteRows> rows_;  // null: the state has no tables
  uint64_t blocks_without_checksum_ = 0;
};

class RemoteNewState final : public csd::NewState {
 public:
  RemoteNewState(Conversation talk, storage::StoreLayout layout, storage::Geometry geometry)
      : talk_(std::move(talk)), layout_(std::move(layout)), geometry_(std::move(geometry)) {}

  const storage::StoreLayout& layout() const override { return layout_; }

  /// The memory is copied on its way, so that nothing uses it when this has returned.
  void start(csd::SubgroupWrite& write) override {
    write.under_way = false;
    write.io.status = Status();
    const std::span<const std::byte> all = write.memory.first(
        base::round_up(geometry_.extent_bytes(write.subgroup), base::kIoAlignment));
    for (uint64_t at = 0; at < all.size() && write.io.status.ok();) {
      const uint64_t some = std::min<uint64_t>(kPieceBytes, all.size() - at);
      auto copy = std::make_shared_for_overwrite<std::byte[]>(some);
      std::copy_n(all.data() + at, some, copy.get());
      const std::span<const std::byte> view(copy.get(), some);
      const SubgroupPiece piece{write.subgroup, at, all.size(),
                                base::checksum(all.subspan(at, some), at)};
      write.io.status = talk_.say(StateAsk(piece), {std::move(copy), view});
      at += some;
    }
    write.under_way = write.io.status.ok();
  }
  Status wait(csd::SubgroupWrite& write) override {
    if (!write.under_way) return write.io.status;
    write.under_way = false;
    write.io.status = ask(WaitFor{write.subgroup});
    return write.io.status;
  }
  Status create_tables(storage::RowFileLayout layout, bool sparse) override {
    tables_ = layout.tables;
    return ask(CreateTables{std::move(layout), sparse});
  }
  Status put_rows(uint32_t table, std::span<const uint32_t> rows,
                  std::span<const std::byte> records) override {
    const uint64_t record = tables_[table].record_bytes;
    for (size_t first = 0; first < rows.size();) {
      const size_t some =
          std::min<size_t>(rows_at_once(tables_[table].record_bytes), rows.size() - first);
      const auto from = records.subspan(first * record, some * record);
      auto copy = std::make_shared<std::vector<std::byte>>(from.begin(), from.end());
      const auto numbers = rows.subspan(first, some);
      const PutTableRows put{table, {numbers.begin(), numbers.end()}, base::checksum(*copy)};
      const std::span<const std::byte> view(*copy);
      SI_RETURN_IF_ERROR(
          talk_.ask<StateAnswer>(StateAsk(put), Payload{std::move(copy), view}).status());
      first += some;
    }
    return Status();
  }
  Status prepare(const std::string& client_metadata) override {
    return ask(PrepareState{client_metadata});
  }
  Status commit() override { return ask(CommitState{}); }
  Status close() override {
    if (!closed_) closed_ = ask(CloseState{});
    return *closed_;
  }
  Status take_place() override { return ask(TakePlace{}); }
  Status give_back() override { return ask(GiveBack{}); }
  Status finish() override { return ask(Finish{}); }

 private:
  template <typename Asked>
  Status ask(const Asked& question) {
    return talk_.ask<StateAnswer>(StateAsk(question)).status();
  }

  Conversation talk_;
  const storage::StoreLayout layout_;
  const storage::Geometry geometry_;
  std::vector<storage::RowTableLayout> tables_;
  std::optional<Status> closed_;
};

}  // namespace

Result<std::unique_ptr<csd::Snapshot>> open_remote_snapshot(const std::string& name,
                                                            const Endpoint& endpoint,
                                                            const RemoteOptions& options,
                                                            storage::ReaderLock lock,
                                                            std::optional<SessionId> session) {
  SI_ASSIGN_OR_RETURN(Conversation talk,
                      Conversation::begin(endpoint, options, Purpose::kSnapshot));
  SI_ASSIGN_OR_RETURN(SnapshotOpened opened, talk.ask<SnapshotOpened>(OpenSnapshot{lock, session}));
  if (Status wrong = check_said(opened.state, opened.layout); !wrong.ok()) return talk.named(wrong);
  return std::unique_ptr<csd::Snapshot>(
      std::make_unique<RemoteSnapshot>(name, std::move(talk), std::move(opened)));
}

Result<std::unique_ptr<csd::NewState>> create_remote_state(
    const Endpoint& endpoint, const RemoteOptions& options, const storage::StoreLayout& layout,
    const csd::NewStateOptions& state_options) {
  const uint32_t slots = state_options.durability == storage::Durability::kNone ? 1 : 2;
  SI_ASSIGN_OR_RETURN(storage::Geometry geometry, storage::Geometry::make(layout, slots));
  SI_ASSIGN_OR_RETURN(Conversation talk,
                      Conversation::begin(endpoint, options, Purpose::kNewState));
  SI_RETURN_IF_ERROR(
      talk.ask<StateAnswer>(CreateState{layout, state_options.durability, state_options.replace})
          .status());
  return std::unique_ptr<csd::NewState>(
      std::make_unique<RemoteNewState>(std::move(talk), layout, std::move(geometry)));
}

}  // namespace smartinf::serve::wire
