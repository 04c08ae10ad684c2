// ProcessGroupGloo.hpp is empty without.
#define USE_C10D_GLOO

#include "smartinf/train/ranks/join_ranks.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include <ATen/core/ivalue.h>
#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/types.h>
#include <unistd.h>

#include "smartinf/base/clock.h"
#include "smartinf/train/ranks/rank_watch.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using engine::Channel;
using engine::Collectives;

namespace {

using Milliseconds = std::chrono::milliseconds;

/// The address under which this machine reaches another one; empty where it does not. Gloo's own
/// choice, the machine's name, is often an address that no other machine reaches.
std::string address_towards(const std::string& host, uint16_t port) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found) != 0) return {};
  std::string address;
  for (const addrinfo* one = found; one != nullptr && address.empty(); one = one->ai_next) {
    const int socket = ::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (socket < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    // Nothing is sent: the kernel only chooses the address.
    if (::connect(socket, one->ai_addr, one->ai_addrlen) == 0 &&
        ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &length) == 0) {
      std::array<char, NI_MAXHOST> text{};
      if (getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text.data(), text.size(), nullptr,
                      0, NI_NUMERICHOST) == 0) {
        address = text.data();
      }
    }
    ::close(socket);
  }
  freeaddrinfo(found);
  return address;
}

std::shared_ptr<gloo::transport::Device> choose_device(const RankEnvironment& environment) {
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"); interface != nullptr) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  }
  const std::string address = address_towards(environment.host, environment.port);
  return address.empty() ? c10d::ProcessGroupGloo::createDefaultDevice()
                         : c10d::ProcessGroupGloo::createDeviceForHostname(address);
}

/// A message of at most so many bytes goes through memory that belongs to its call, which gloo
/// keeps as long as it works on it: the memory of short messages ends with their senders, whatever
/// has become of the call. The exchanges keep that of the long ones (Collectives::hangs()).
constexpr size_t kOwnBytesMax = size_t{1} << 20;

torch::Tensor bytes_of(std::span<const std::byte> bytes) {
  const auto options = torch::dtype(torch::kUInt8);
  if (bytes.empty()) return torch::empty({0}, options);
  const torch::Tensor here = torch::from_blob(const_cast<std::byte*>(bytes.data()),
                                              {static_cast<int64_t>(bytes.size())}, options);
  return bytes.size() <= kOwnBytesMax ? here.clone() : here;
}

/// What a call puts into `from` belongs to `to`.
struct Received {
  torch::Tensor from;
  std::span<std::byte> to;

  void take() const {
    if (!to.empty() && from.data_ptr() != to.data()) {
      std::memcpy(to.data(), from.data_ptr(), to.size());
    }
  }
};

std::vector<int64_t> counts_of(std::span<const uint64_t> bytes) {
  return {bytes.begin(), bytes.end()};
}

/// Without what gloo guesses and wishes.
std::string text_of(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, std::min({text.find('\n'), text.find(". This is typically"), size_t{300}}));
}

using Work = c10::intrusive_ptr<c10d::Work>;
using Groups = std::array<c10::intrusive_ptr<c10d::Backend>, engine::kChannels>;

/// Of a socket with another end; none for any other file. No other socket ever has the same.
std::optional<ino_t> connection_at(int number) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  struct stat of {};
  if (::getpeername(number, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return {};
  return ::fstat(number, &of) == 0 ? std::optional(of.st_ino) : std::nullopt;
}

/// Of this process: file numbers, and what connection_at() says of them.
using Connections = std::set<std::pair<int, ino_t>>;
Connections open_connections() {
  Connections connections;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int number = std::atoi(entry.path().filename().c_str());
    if (const auto inode = connection_at(number)) connections.emplace(number, *inode);
  }
  return connections;
}

/// Gloo has no call that ends what is under way: without this, two ranks that know of a third one's
/// failure can wait for each other as long as the timeout.
void end_connections(const Connections& connections) {
  for (const auto& [number, inode] : connections) {
    if (connection_at(number) == inode) ::shutdown(number, SHUT_RDWR);
  }
}

/// Errors: torch throws.
Groups connect_groups(RankWatch& watch, const RankEnvironment& environment) {
  const Connections before = open_connections();
  const auto device = choose_device(environment);
  Groups groups;
  for (size_t channel = 0; channel < groups.size(); ++channel) {
    auto options = c10d::ProcessGroupGloo::Options::create(watch.timeout());
    options->devices = {device};
    options->threads = 1;  // calls of a channel run one after another
    groups[channel] = c10::make_intrusive<c10d::ProcessGroupGloo>(
        watch.store(fmt::format("channel/{}", channel)), static_cast<int>(environment.rank),
        static_cast<int>(environment.world), options);
  }
  const Connections after = open_connections();
  Connections opened;
  std::ranges::set_difference(after, before, std::inserter(opened, opened.end()));
  watch.when_failed([opened] { end_connections(opened); });
  return groups;
}

/// The same on a thread that is left behind when it hangs in a connection to the store. Errors:
/// torch throws.
Groups connect(const std::shared_ptr<RankWatch>& watch, const RankEnvironment& environment) {
  std::promise<Groups> made;
  std::future<Groups> groups = made.get_future();
  std::thread([watch, environment, made = std::move(made)]() mutable {
    try {
      made.set_value(connect_groups(*watch, environment));
    } catch (...) {
      made.set_exception(std::current_exception());
    }
  }).detach();
  if (groups.wait_for(2 * watch->timeout()) == std::future_status::ready) return groups.get();
  throw std::runtime_error("the ranks do not connect to each other");
}

class GlooCollectives final : public Collectives {
 public:
  GlooCollectives(std::shared_ptr<RankWatch> watch, Groups groups)
      : watch_(std::move(watch)), groups_(std::move(groups)) {}
  /// A group waits for its calls when it is destroyed. One that hangs ends with the process.
  ~GlooCollectives() override {
    if (!hangs_) return;
    for (auto& group : groups_) static_cast<void>(group.release());
  }

  uint32_t rank() const override { return watch_->rank(); }
  uint32_t world() const override { return static_cast<uint32_t>(watch_->members().size()); }

  Started all_to_all(Channel channel, std::span<const std::byte> send,
                     std::span<const uint64_t> send_bytes, std::span<std::byte> receive,
                     std::span<const uint64_t> receive_bytes) override {
    torch::Tensor to = bytes_of(receive);
    return start(channel, {{to, receive}}, [&](c10d::Backend& group) {
      torch::Tensor from = bytes_of(send);
      std::vector<int64_t> send_counts = counts_of(send_bytes);
      std::vector<int64_t> receive_counts = counts_of(receive_bytes);
      return group.all_to_all_single(to, from, receive_counts, send_counts);
    });
  }

  Started broadcast(Channel channel, std::span<std::byte> bytes, uint32_t root) override {
    std::vector<torch::Tensor> tensors{bytes_of(bytes)};
    return start(channel, {{tensors[0], bytes}}, [&](c10d::Backend& group) {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return group.broadcast(tensors, options);
    });
  }

  Started all_gather(Channel channel, std::span<const std::byte> mine,
                     std::span<std::byte> all) override {
    std::vector<std::vector<torch::Tensor>> to(1);
    std::vector<Received> received;
    for (size_t rank = 0; rank < world(); ++rank) {
      const std::span<std::byte> one = all.subspan(rank * mine.size(), mine.size());
      to[0].push_back(bytes_of(one));
      received.push_back({to[0].back(), one});
    }
    return start(channel, std::move(received), [&](c10d::Backend& group) {
      std::vector<torch::Tensor> from{bytes_of(mine)};
      return group.allgather(to, from);
    });
  }

  Status barrier(Channel channel) override {
    SI_ASSIGN_OR_RETURN(const std::unique_ptr<Pending> begun,
                        start(channel, {}, [&](c10d::Backend& group) { return group.barrier(); }));
    return begun->wait();
  }

  Status arrive() override { return watch_->arrive(); }
  void failed(const Status& why) override { watch_->report(why); }
  bool hangs() const override { return hangs_; }

 private:
  class Call final : public Pending {
   public:
    Call(GlooCollectives& ranks, Channel channel, std::vector<Received> received, Work work)
        : ranks_(ranks),
          channel_(channel),
          received_(std::move(received)),
          work_(std::move(work)),
          done_(new Done) {
      work_->getFuture()->addCallback([done = done_](const c10::ivalue::Future&) {
        const std::scoped_lock lock(done->mutex);
        done->yes = true;
        done->changed.notify_all();
      });
    }
    ~Call() override {
      if (work_ != nullptr) static_cast<void>(wait());
    }

    Status wait() override {
      const Work work = std::exchange(work_, nullptr);
      RankWatch& watch = *ranks_.watch_;
      // A failure ends the connections, and gloo has a limit of its own: until then the call's
      // memory is in use. But a call that gloo begins while they end may not hear of it.
      using Clock = std::chrono::steady_clock;
      auto until = Clock::now() + watch.timeout() + kEnding;
      bool failed = false;
      {
        std::unique_lock lock(done_->mutex);
        while (!done_->yes && Clock::now() < until) {
          done_->changed.wait_for(lock, Milliseconds(100));
          if (failed || watch.failure().ok()) continue;
          failed = true;
          until = std::min(until, Clock::now() + kEnding);
        }
      }
      const bool timed_out = base::seconds_since(begin_ns_) >=
                             0.9 * std::chrono::duration<double>(watch.timeout()).count();
      if (!work->isCompleted() && !done_->yes) {
        ranks_.hangs_ = true;
        return watch.cause_of(channel_, "a call between ranks does not end", timed_out);
      }
      try {
        work->wait();
        for (const Received& one : received_) one.take();
        return Status();
      } catch (const std::exception& error) {
        return watch.cause_of(channel_, text_of(error), timed_out);
      }
    }

   private:
    static constexpr std::chrono::seconds kEnding{10};
    struct Done {
      std::mutex mutex;
      std::condition_variable changed;
      bool yes = false;
    };
    GlooCollectives& ranks_;
    const Channel channel_;
    const std::vector<Received> received_;
    Work work_;
    const std::shared_ptr<Done> done_;  // with the callback
    const uint64_t begin_ns_ = base::now_ns();
  };

  template <typename Begin>
  Started start(Channel channel, std::vector<Received> received, Begin begin) {
    SI_RETURN_IF_ERROR(watch_->failure());
    watch_->count_call(channel);
    try {
      Work work = begin(*groups_[static_cast<size_t>(channel)]);
      return std::unique_ptr<Pending>(
          new Call(*this, channel, std::move(received), std::move(work)));
    } catch (const std::exception& error) {
      return watch_->cause_of(channel, text_of(error), /*timed_out=*/false);
    }
  }

  // Connections end first: who sees them break can then still learn why.
  std::shared_ptr<RankWatch> watch_;  // the thread that connected may still hold it
  Groups groups_;
  std::atomic<bool> hangs_ = false;  // a call that was given up
};

}  // namespace

Result<Ranks> join_ranks(const RankEnvironment& environment, Milliseconds timeout) {
  std::signal(SIGPIPE, SIG_IGN);
  // What torch's connections print of their troubles; what they mean is said by the errors here.
  if (::setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*overwrite=*/0) == 0) c10::initLogging();
  SI_ASSIGN_OR_RETURN(std::unique_ptr<RankWatch> joined, RankWatch::join(environment, timeout));
  const std::shared_ptr<RankWatch> watch = std::move(joined);
  const std::vector<RankMember>& members = watch->members();
  const std::string& here = members[environment.rank].machine;
  std::vector<std::string> names;
  uint32_t local_rank = 0;
  uint32_t local_world = 0;
  for (const RankMember& member : members) {
    names.push_back(member.name());
    if (member.machine != here) continue;
    if (member.rank < environment.rank) ++local_rank;
    ++local_world;
  }
  try {
    return Ranks(std::make_shared<GlooCollectives>(watch, connect(watch, environment)),
                 std::move(names), local_rank, local_world);
  } catch (const std::exception& error) {
    return watch->cause_of(Channel::kControl,
                           fmt::format("{} (the environment's GLOO_SOCKET_IFNAME may name the "
                                       "network interface between the machines)",
                                       text_of(error)),
                           /*timed_out=*/false);
  }
}

}  // namespace smartinf::train
