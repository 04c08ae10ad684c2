// Messages between client and server. Every stream begins with Hello and Welcome; what follows
// depends on the stream's purpose:
//
//   kAsk       Ask, then Answers until one is the last
//   kSession   Attach and Attached, then the commands of an open device: Up and Down frames
//   kSnapshot  OpenSnapshot and SnapshotOpened, then a SnapshotAsk and its SnapshotAnswer each
//   kNewState  CreateState and StateAnswer, then a StateAsk and its StateAnswer each
//
// A session outlives its streams. Both sides number their frames and keep them until the other one
// says that they came (ReliableLink): in Attach and Attached, and then the server in every Down
// frame, the client in Acks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "smartinf/base/codec.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/device_source.h"
#include "smartinf/storage/check_store.h"
#include "smartinf/storage/state_reader.h"
#include "smartinf/storage/summary.h"

namespace smartinf::serve::wire {

/// Changes with every change of what is below. Hello and Welcome stay as they are for ever.
inline constexpr uint32_t kProtocolVersion = 9;
inline constexpr uint64_t kProtocolMagic = 0x31454d4552464e49;  // "INFREME1"

enum class Purpose : uint8_t { kAsk, kSession, kSnapshot, kNewState };

struct Hello {
  uint64_t magic = kProtocolMagic;
  uint32_t version = kProtocolVersion;
  // Read only where the version is the same.
  Purpose purpose = Purpose::kAsk;
  std::string device;
};

struct Welcome {
  uint64_t magic = kProtocolMagic;
  uint32_t version = kProtocolVersion;
  base::Status outcome;
};

// ---- Of a device that is not open.

struct Peek {};
struct Summarize {};
struct Check {
  uint64_t memory_bytes = 0;
  uint32_t io_depth = 0;
  bool repair = false;
  std::optional<base::StepNumber> step;
};
struct Measure {};  // bandwidth
struct Capacity {};
struct Describe {};  // asks for the facts that do not change
struct Erase {};
using Ask = std::variant<Peek, Summarize, Check, Measure, Capacity, Describe, Erase>;

struct Peeked {
  std::optional<storage::StoreState> state;
};
struct Measured {
  double bytes_per_second = 0;
};
struct Capable {
  uint64_t bytes = 0;
};
struct Described {
  std::string place, drive;
  bool keeps_replaced = false;
};
struct Erased {};
struct Progress {  // of a check: more follows
  uint64_t blocks_done = 0, blocks_total = 0;
};
using Answer = std::variant<base::Status, Peeked, storage::StoreSummary, storage::CheckReport,
                            Measured, Capable, Described, Erased, Progress, storage::StoreFault>;

// ---- Of an open device.

using SessionId = std::array<uint64_t, 2>;

struct Attach {
  std::optional<SessionId> session;  // goes on with it; none: a new one...
  uint64_t received = 0;             // ...and of it the last Down frame that came
  // Fields of a new session:
  std::optional<storage::StoreLayout> create;  // none: opened
  csd::DeviceShare share;
  csd::SourceWishes wishes;
};

struct Vitals {
  base::TrafficReading host, store;
  uint64_t written_ever = 0;
  uint64_t cached_bytes = 0;
};

struct Standing {
  storage::StoreState state;
  std::string client_metadata;
  uint64_t state_cache_bytes = 0;
  uint32_t cached_subgroups = 0;
};

struct Attached {
  base::Status outcome;
  SessionId session{};
  uint64_t received = 0;  // the last Up frame that came
  // Fields of a new session:
  csd::DeviceInfo info;
  storage::StoreLayout layout;
  Standing standing;
  Vitals vitals;
};

// Questions to a device besides its messages.
struct RecoverTo {
  base::StepNumber step = 0;
};
struct CacheState {
  std::vector<base::SubgroupId> subgroups;
};
using CommandBody = std::variant<csd::Message, RecoverTo, CacheState>;

/// Its number names it in what comes back. The payload is the memory that goes down with a message,
/// as its memory() lists it. One of one piece at most is in the same frame, a longer one follows in
/// Piece frames before anything else.
struct CommandFrame {
  uint64_t payload_bytes = 0;
  uint64_t checksum = 0;  // of a payload in this frame; seed: 0
  CommandBody body;
};
struct PieceFrame {
  uint64_t checksum = 0;  // seed: its offset
};
/// Not numbered: the Down frames up to this one came.
struct AckFrame {
  uint64_t received = 0;
};
struct ByeFrame {};
struct Up {
  uint64_t number = 0;
  std::variant<CommandFrame, PieceFrame, AckFrame, ByeFrame> body;
};

/// A part of a command's results.
struct DataFrame {
  uint64_t command = 0;
  uint32_t place = 0;  // among the memory that the message has for results, as memory() lists it
  uint64_t offset_bytes = 0;
  uint64_t checksum = 0;  // seed: the offset
};
struct ReadyFrame {
  uint64_t command = 0;
  base::SubgroupId subgroup;
  Vitals vitals;
};
struct DoneFrame {
  uint64_t command = 0;
  base::Status outcome;
  Vitals vitals;
  std::optional<Standing> standing;  // when the command may have changed it
};
/// Now and then while the device moves bytes and has nothing to answer.
struct VitalsFrame {
  Vitals vitals;
};
/// The device is closed and the session at its end.
struct ClosedFrame {
  base::Status outcome;  // why, unless the client asked for it
};
struct Down {
  uint64_t number = 0;
  uint64_t received = 0;  // the Up frames up to this one came
  std::variant<DataFrame, ReadyFrame, DoneFrame, VitalsFrame, ClosedFrame> body;
};

// ---- Of a state as a whole.

struct OpenSnapshot {
  storage::ReaderLock lock = storage::ReaderLock::kTake;
  std::optional<SessionId> session;  // of the device that is open
};
struct SnapshotOpened {
  base::Status outcome;
  storage::StoreState state;
  storage::StoreLayout layout;
  std::string drive;
};
struct ChooseStep {
  base::StepNumber step = 0;
};
struct ReadBlocks {
  uint64_t subgroup = 0, plane = 0, first = 0, count = 0;
};
/// The tables of the step that was chosen.
struct OpenRows {};
/// The answer's payload: of each row whether it was written (u8), then the records of those that
/// were.
struct ReadRows {
  uint32_t table = 0;
  std::vector<uint32_t> rows;  // ascending, kRowsOfAskMax at most
};
inline constexpr uint64_t kRowsOfAskMax = 4096;
using SnapshotAsk = std::variant<ChooseStep, ReadBlocks, OpenRows, ReadRows>;
struct SnapshotAnswer {
  base::Status outcome;
  std::string client_metadata;  // of ChooseStep
  std::optional<storage::RowFileLayout> tables;  // of OpenRows; none: the state has none
  uint64_t blocks_without_checksum = 0;
  uint64_t checksum = 0;  // of the payload; seed: 0
};

struct CreateState {
  storage::StoreLayout layout;
  storage::Durability durability = storage::Durability::kStep;
  bool replace = false;
};
/// The payload is a piece of a subgroup's memory; the last one starts the write.
struct SubgroupPiece {
  uint64_t subgroup = 0;
  uint64_t offset_bytes = 0, total_bytes = 0;
  uint64_t checksum = 0;  // seed: the offset
};
struct WaitFor {
  uint64_t subgroup = 0;
};
struct PrepareState {
  std::string client_metadata;
};
struct CommitState {};
struct CloseState {};
struct TakePlace {};
struct GiveBack {};
struct Finish {};
struct CreateTables {
  storage::RowFileLayout layout;
  bool sparse = false;
};
/// The payload is their records.
struct PutTableRows {
  uint32_t table = 0;
  std::vector<uint32_t> rows;  // ascending, kRowsOfAskMax at most
  uint64_t checksum = 0;       // seed: 0
};
/// Answered each, but for SubgroupPiece.
using StateAsk = std::variant<SubgroupPiece, WaitFor, PrepareState, CommitState, CloseState,
                              TakePlace, GiveBack, Finish, CreateTables, PutTableRows>;
struct StateAnswer {
  base::Status outcome;
};

}  // namespace smartinf::serve::wire
