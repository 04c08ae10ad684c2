// ProcessGroupGloo.hpp is empty without.
#define USE_C10D_GLOO

#include "smartinf/train/ranks/join_ranks.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <future>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/types.h>
#include <unistd.h>

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

/// Without what gloo guesses and wishes.
std::string text_of(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, std::min({text.find('\n'), text.find(". This is typically"), size_t{300}}));
}

using Work = c10::intrusive_ptr<c10d::Work>;
using Groups = std::array<c10::intrusive_ptr<c10d::Backend>, engine::kChannels>;

/// Errors: torch throws.
Groups connect_groups(RankWatch& watch, const RankEnvironment& environment) {
  const auto device = choose_device(environment);
  Groups groups;
  for (size_t channel = 0; channel < groups.size(); ++channel) {
    auto options = c10d::ProcessGroupGloo::Options::create(watch.timeout());
    options->devices = {device};
    options->threads = 1;  // which has nothing to do: messages need none
    groups[channel] = c10::make_intrusive<c10d::ProcessGroupGloo>(
        watch.store(fmt::format("channel/{}", channel)), static_cast<int>(environment.rank),
        static_cast<int>(environment.world), options);
  }
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

/// State that the calls of all groups share: the connections, and messages that are under way,
/// which a failure of any rank ends.
class Mesh {
 public:
  Mesh(std::shared_ptr<RankWatch> watch, Groups groups)
      : watch_(std::move(watch)), groups_(std::move(groups)) {
    watch_->when_failed([this] {
      const std::scoped_lock lock(mutex_);
      broken_ = true;
      for (c10d::Work* work : under_way_) work->abort();
    });
  }
  ~Mesh() { watch_->when_failed({}); }
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  RankWatch& watch() { return *watch_; }
  c10d::Backend& group(Channel channel) { return *groups_[static_cast<size_t>(channel)]; }
  uint32_t new_group() { return ++made_; }

  void add(const Work& work) {
    const std::scoped_lock lock(mutex_);
    under_way_.insert(work.get());
    if (broken_) work->abort();
  }
  void remove(const Work& work) {
    const std::scoped_lock lock(mutex_);
    under_way_.erase(work.get());
  }

 private:
  // Connections end first: who sees them break can then still learn why.
  std::shared_ptr<RankWatch> watch_;  // the thread that connected may still hold it
  Groups groups_;
  std::atomic<uint32_t> made_ = 0;
  std::mutex mutex_;  // of what follows
  std::set<c10d::Work*> under_way_;
  bool broken_ = false;
};

/// Every call is made of messages from rank to rank, so that what is missing has a name. Gloo
/// touches a message's memory only while its Work is there.
class GlooCollectives final : public Collectives {
 public:
  /// members: ranks of the run, this one at `here`. group: 0 for all.
  GlooCollectives(std::shared_ptr<Mesh> mesh, std::vector<uint32_t> members, uint32_t here,
                  uint32_t group)
      : mesh_(std::move(mesh)), members_(std::move(members)), here_(here), group_(group) {}

  uint32_t rank() const override { return here_; }
  uint32_t world() const override { return static_cast<uint32_t>(members_.size()); }
  uint32_t rank_of_run(uint32_t rank) const override { return members_[rank]; }

  Result<std::shared_ptr<Collectives>> group(std::span<const uint32_t> ranks) override {
    if (group_ != 0) return Status(ErrorCode::kUnsupported, "a group of a group of ranks");
    const uint32_t number = mesh_->new_group();
    const auto here = std::ranges::find(ranks, here_);
    if (here == ranks.end()) return std::shared_ptr<Collectives>();
    return std::shared_ptr<Collectives>(
        std::make_shared<GlooCollectives>(mesh_, std::vector<uint32_t>(ranks.begin(), ranks.end()),
                                          static_cast<uint32_t>(here - ranks.begin()), number));
  }

  Started send(Channel channel, std::span<const std::byte> bytes, uint32_t to) override {
    return start(channel, [&](Call& call) { call.send(bytes, to, kPair); });
  }
  Started receive(Channel channel, std::span<std::byte> bytes, uint32_t from) override {
    return start(channel, [&](Call& call) { call.receive(bytes, from, kPair); });
  }

  Started all_to_all(Channel channel, std::span<const std::byte> send,
                     std::span<const uint64_t> send_bytes, std::span<std::byte> receive,
                     std::span<const uint64_t> receive_bytes) override {
    return start(channel, [&](Call& call) {
      for (uint32_t rank = 0; rank < world(); ++rank) {
        const auto out = send.first(send_bytes[rank]);
        const auto in = receive.first(receive_bytes[rank]);
        send = send.subspan(out.size());
        receive = receive.subspan(in.size());
        if (rank == here_) {
          std::ranges::copy(out, in.begin());
        } else {
          call.receive(in, rank, kAll);
          call.send(out, rank, kAll);
        }
      }
    });
  }

  Started broadcast(Channel channel, std::span<std::byte> bytes, uint32_t root) override {
    return start(channel, [&](Call& call) {
      if (here_ != root) return call.receive(bytes, root, kAll);
      for (const uint32_t rank : others()) call.send(bytes, rank, kAll);
    });
  }

  Started all_gather(Channel channel, std::span<const std::byte> mine,
                     std::span<std::byte> all) override {
    return start(channel, [&](Call& call) {
      std::ranges::copy(mine, all.subspan(here_ * mine.size()).begin());
      for (const uint32_t rank : others()) {
        call.receive(all.subspan(rank * mine.size(), mine.size()), rank, kAll);
        call.send(mine, rank, kAll);
      }
    });
  }

  Status barrier(Channel channel) override {
    std::vector<std::byte> all(world());
    return engine::all_gather(*this, channel, std::array{std::byte{}}, all);
  }

  Status barrier_without_timeout() override { return mesh_->watch().barrier_without_timeout(); }
  void failed(const Status& why) override { mesh_->watch().report(why); }

 private:
  enum Line : uint32_t { kAll, kPair };  // messages of one do not wait for those of the other

  class Call final : public Pending {
   public:
    Call(GlooCollectives& ranks, Channel channel)
        : ranks_(ranks), mesh_(ranks.mesh_), channel_(channel) {}
    ~Call() override { drop(); }

    void receive(std::span<std::byte> bytes, uint32_t from, Line line) {
      add(receiving_, bytes, from, line, &c10d::Backend::recv);
    }
    void send(std::span<const std::byte> bytes, uint32_t to, Line line) {
      const std::span<std::byte> unchanged(const_cast<std::byte*>(bytes.data()), bytes.size());
      add(sending_, unchanged, to, line, &c10d::Backend::send);
    }

    Status wait() override {
      RankWatch& watch = mesh_->watch();
      const auto until = Clock::now() + watch.timeout();
      Status result;
      // Gloo does not hear of it when a rank dies that it sends to: what is received comes first.
      for (const auto* messages : {&receiving_, &sending_}) {
        for (const Message& message : *messages) {
          const auto left = std::chrono::duration_cast<Milliseconds>(until - Clock::now());
          watch.waits_for(channel_, message.rank);
          std::string what = "a message was given up";
          try {
            if (message.work->wait(std::max(left, Milliseconds(1)))) continue;
          } catch (const std::exception& error) {
            what = text_of(error);
          }
          result = watch.cause_of(channel_, message.rank, what, Clock::now() >= until);
          break;
        }
        if (!result.ok()) break;
      }
      watch.waits_for(channel_, {});
      drop();
      return result;
    }

   private:
    using Clock = std::chrono::steady_clock;
    struct Message {
      Work work;
      uint32_t rank;  // of the run
    };

    using Begin = Work (c10d::Backend::*)(std::vector<torch::Tensor>&, int, int);
    void add(std::vector<Message>& to, std::span<std::byte> bytes, uint32_t rank, Line line,
             Begin begin) {
      if (bytes.empty()) return;
      std::vector<torch::Tensor> tensor{torch::from_blob(
          bytes.data(), {static_cast<int64_t>(bytes.size())}, torch::dtype(torch::kUInt8))};
      const uint32_t other = ranks_.members_[rank];
      const auto tag = static_cast<int>(2 * ranks_.group_ + line);
      to.push_back({(mesh_->group(channel_).*begin)(tensor, static_cast<int>(other), tag), other});
      mesh_->add(to.back().work);
    }
    void drop() {
      for (auto* messages : {&receiving_, &sending_}) {
        for (const Message& message : *messages) mesh_->remove(message.work);
        messages->clear();
      }
    }

    GlooCollectives& ranks_;
    const std::shared_ptr<Mesh> mesh_;
    const Channel channel_;
    std::vector<Message> receiving_;
    std::vector<Message> sending_;
  };

  std::vector<uint32_t> others() const {
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < world(); ++rank) {
      if (rank != here_) ranks.push_back(rank);
    }
    return ranks;
  }

  template <typename Begin>
  Started start(Channel channel, const Begin& begin) {
    SI_RETURN_IF_ERROR(mesh_->watch().failure());
    auto call = std::make_unique<Call>(*this, channel);
    try {
      begin(*call);
    } catch (const std::exception& error) {
      return mesh_->watch().cause_of(channel, {}, text_of(error), /*timed_out=*/false);
    }
    return std::unique_ptr<Pending>(std::move(call));
  }

  const std::shared_ptr<Mesh> mesh_;
  const std::vector<uint32_t> members_;
  const uint32_t here_;
  const uint32_t group_;
};

}  // namespace

Result<Ranks> join_ranks(const RankEnvironment& environment, Milliseconds timeout) {
  std::signal(SIGPIPE, SIG_IGN);
  // Log level of torch's connections, which print their troubles; what they mean is said by the
  // errors here.
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
    std::vector<uint32_t> all(environment.world);
    std::iota(all.begin(), all.end(), 0u);
    auto mesh = std::make_shared<Mesh>(watch, connect(watch, environment));
    return Ranks(std::make_shared<GlooCollectives>(std::move(mesh), std::move(all),
                                                   environment.rank, /*group=*/0),
                 std::move(names), local_rank, local_world);
  } catch (const std::exception& error) {
    return watch->cause_of(Channel::kControl, {},
                           fmt::format("{} (the environment's GLOO_SOCKET_IFNAME may name the "
                                       "network interface between the machines)",
                                       text_of(error)),
                           /*timed_out=*/false);
  }
}

}  // namespace smartinf::train
