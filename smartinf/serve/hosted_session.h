// The server's half of a session: one client's use of one open device. It outlives the streams that
// it is spoken over, until the client says good-bye, its lease expires or the server stops.
//
// Two threads: that of the stream in use, which reads commands and gives them to the device, and
// the session's own, which takes what the device answers and sends it. What is sent and not yet
// acknowledged is kept; its memory is the commands' own, so that nothing is queued beyond what the
// client has asked for, and that was taken from the device's account.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/serve/command_gate.h"
#include "smartinf/serve/hosted_device.h"
#include "smartinf/serve/protocol_fields.h"
#include "smartinf/serve/reliable_link.h"
#include "smartinf/serve/stream.h"

namespace smartinf::serve::wire {

/// The memory of a message, each way.
struct MessageBytes {
  uint64_t down_bytes = 0, up_bytes = 0;
  bool has_samples = false;
};

class HostedSession {
 public:
  struct Limits {
    std::chrono::duration<double> lease{60};  // a client may be away for so long
  };

  /// Opens or creates the device. Errors: the device's; what the gate refuses; kBusy; kOutOfMemory.
  static base::Result<std::shared_ptr<HostedSession>> open(HostedDevice& device, const Peer& client,
                                                           const Attach& request, Limits limits);
  ~HostedSession();

  const SessionId& id() const { return id_; }
  const Peer& client() const { return client_; }
  bool attached() const;

  /// Serves a stream until it breaks: takes the session over from one that had it, which is
  /// cancelled, and says where both sides are. client_received: the last Down frame that came
  /// there; fresh: the session's first stream. Returns why it ended.
  base::Status serve(Stream& stream, uint64_t client_received, bool fresh);

  /// Between steps, for reading beside the device.
  base::Result<std::unique_ptr<csd::Snapshot>> snapshot();

  /// Ends it soon: the device is closed, which ends what is under way. Threads: any.
  void end(base::Status why);
  /// Breaks its connection, also for a client that does not read. Threads: any.
  void cancel_stream();
  /// Waits until it has ended. False: it has not in that time.
  bool wait_ended(std::chrono::duration<double> wait);
  /// The end of the step: "step 7 was aborted".
  std::string last_words() const;

 private:
  /// Where a command puts its results: one after another, and the samples of the whole space.
  struct Region {
    Charge charge;
    base::AlignedBuffer results, samples;
  };
  /// A command on its way, with the memory that it reads and writes.
  struct Running {
    csd::Command command;
    CommandBody body;  // until it is the command's
    uint64_t number = 0;
    MessageBytes size;
    Charge charge, body_charge;
    base::AlignedBuffer in;
    uint64_t came = 0;  // of size.down_bytes
    std::shared_ptr<Region> region;
    base::Status damaged;  // the frame did not come as it was sent
  };
  struct Entry {
    std::variant<DataFrame, ReadyFrame, DoneFrame, VitalsFrame, ClosedFrame> body;
    Payload payload;
  };

  /// Buffers of gradients, used again.
  static constexpr size_t kSpareMax = 16;

  HostedSession(HostedDevice& device, Peer client, const Attach& request, Limits limits);
  base::Status open_device(const Attach& request);
  Attached greeting() const;
  base::Status take_over(uint64_t client_received);
  void detach(Stream& stream);

  // On the stream's thread.
  base::Status receive(const InFrame& frame);
  base::Status begin_command(CommandFrame command, uint64_t number, const InFrame& frame);
  base::Status take_piece(const PieceFrame& piece, const InFrame& frame);
  void submit(const std::shared_ptr<Running>& running);
  base::Status try_submit(const std::shared_ptr<Running>& running);
  base::Status cache_state(const CacheState& cache);
  base::Status check_tables(const csd::OpenTables& tables) const;
  MessageBytes size_of(csd::Message& message) const;
  base::Status take_region(Running& running);
  void bind_memory(Running& running) const;
  void answer(uint64_t number, base::Status status);

  // On the session's.
  void run();
  void on_completion(const csd::Completion& completion);
  void on_ready(const std::shared_ptr<Running>& running, base::SubgroupId subgroup);
  void give_results(const std::shared_ptr<Running>& running,
                    std::optional<base::SubgroupId> subgroup);
  void give_data(uint64_t command, uint32_t place, Payload payload);
  bool send_one();
  bool goes_on();
  void show_life();
  void close_device();
  Vitals vitals() const;
  Standing standing() const;
  void push(Entry entry);
  void push_done(DoneFrame done);

  HostedDevice& hosted_;
  const Peer client_;
  const Limits limits_;
  const SessionId id_;
  DeviceLease lease_;
  Charge device_charge_, cache_charge_;
  // For what an answer says of the state; a client that reads has a few of them unacknowledged.
  MemoryAccount standings_{uint64_t{16} << 20};
  csd::DeviceShare share_;
  std::optional<csd::DeviceSpace> space_;
  bool created_ = false;
  std::unique_ptr<csd::DeviceSource> source_;
  std::optional<CommandGate> gate_;
  csd::CompletionQueue completions_;  // an empty one wakes the session's thread

  std::mutex submit_mutex_;  // of device_: nothing is submitted while it is closed
  std::unique_ptr<csd::Device> device_;
  std::shared_ptr<Running> assembling_;           // the stream's thread's own
  uint64_t skip_bytes_ = 0;                       // of pieces of a command that was refused
  std::vector<std::shared_ptr<Region>> regions_;  // updates'; in use where others hold them

  mutable std::mutex mutex_;  // of everything below
  std::condition_variable changed_;
  std::list<std::shared_ptr<Running>> running_;
  std::vector<base::AlignedBuffer> spare_;  // of a piece each
  Stream* stream_ = nullptr;
  bool writing_ = false;
  bool taking_over_ = false;
  std::chrono::steady_clock::time_point detached_at_ = std::chrono::steady_clock::now();
  ReliableLink<Entry> link_;
  Vitals vitals_;  // as last seen
  Standing standing_;
  base::StepNumber step_ = 0;
  bool ending_ = false;
  base::Status end_why_;
  bool ended_ = false;
  std::string last_words_;

  std::jthread thread_;
};

/// The same client again, whose last session nobody is at: it was killed, and need not wait for its
/// own lease. True: the device may be free now. Bound: a second until the end of the old connection
/// is noticed, and ten for the end of the session.
bool session_gives_way(HostedDevice& device, const Peer& peer);

}  // namespace smartinf::serve::wire
