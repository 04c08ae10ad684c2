#include "smartinf/train/ranks/rank_watch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/file.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

constexpr const char* kFailure = "failure";
constexpr const char* kNone = "-";
constexpr const char* kLeft = "left";  // in place of a sign of life: nothing more comes
constexpr std::chrono::milliseconds kSignsMin{20};
constexpr std::chrono::milliseconds kSignsMax{5000};

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// State of a process on this machine, from /proc: its state's letter, and when it began.
struct ProcessState {
  char letter = 0;
  uint64_t started = 0;
};
std::optional<ProcessState> process_state(uint64_t process) {
  const std::string stat = first_line(fmt::format("/proc/{}/stat", process).c_str());
  const size_t name_end = stat.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return {};
  std::istringstream rest(stat.substr(name_end + 1));
  const std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};
  constexpr size_t kStarted = 19;  // field 22 of proc(5), counted from the state
  if (fields.size() <= kStarted) return {};
  return ProcessState{fields[0][0], std::stoull(fields[kStarted])};
}

std::string machine_of_this() {
  std::array<char, 128> space{};
  const ssize_t length = readlink("/proc/self/ns/pid", space.data(), space.size());
  return first_line("/proc/sys/kernel/random/boot_id") + "/" +
         std::string(space.data(), length > 0 ? static_cast<size_t>(length) : 0);
}

RankMember this_process(uint32_t rank) {
  RankMember member;
  member.rank = rank;
  member.process = static_cast<uint64_t>(getpid());
  const auto state = process_state(member.process);
  member.started = state ? state->started : 0;
  member.machine = machine_of_this();
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) == 0) member.host = host.data();
  return member;
}

std::string to_text(const RankMember& member) {
  return fmt::format("{} {} {} {}", member.process, member.started, member.machine, member.host);
}

RankMember member_from(uint32_t rank, const std::string& text) {
  RankMember member;
  member.rank = rank;
  std::istringstream in(text);
  in >> member.process >> member.started >> member.machine >> member.host;
  return member;
}

/// In the store: the code's number, the advice, and what failed.
std::string to_text(const Status& status) {
  return fmt::format("{}\n{}\n{}", static_cast<int>(status.code()), status.advice(), status.what());
}

Status status_from(const std::string& text) {
  const size_t code_end = text.find('\n');
  const size_t advice_end = text.find('\n', code_end + 1);
  if (code_end == std::string::npos || advice_end == std::string::npos) {
    return Status(ErrorCode::kIo, text);
  }
  return Status(static_cast<ErrorCode>(std::stoi(text.substr(0, code_end))),
                text.substr(advice_end + 1), text.substr(code_end + 1, advice_end - code_end - 1));
}

double seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

std::string sign_key(uint32_t rank) { return fmt::format("sign/{}", rank); }
std::string member_key(uint32_t rank) { return fmt::format("member/{}", rank); }

std::string without_lines(const char* what) {
  const std::string text = what;
  return text.substr(0, std::min(text.find('\n'), size_t{300}));
}

constexpr const char* kResume =
    "The last committed step stands: start all ranks again to go on from it";

}  // namespace

std::string RankMember::name() const {
  return fmt::format("rank {} (process {} on {})", rank, process, host);
}

struct RankWatch::Shared {
  static constexpr int kNobody = -1;
  /// The rank whose message a rank waits for, on each channel.
  using Waits = std::array<int, engine::kChannels>;
  Shared() { std::ranges::fill(waits, kNobody); }
  /// Facts known of a rank.
  struct Known {
    std::string sign;
    uint64_t changed_ns = 0;
    Waits waits = [] {
      Waits none;
      none.fill(kNobody);
      return none;
    }();
    uint64_t arrivals = 0;
    bool left = false;
  };

  RankEnvironment environment;
  Milliseconds timeout{0};
  Milliseconds between{0};  // signs of life
  std::vector<RankMember> members;
  c10::intrusive_ptr<c10d::Store> connection;  // the watch's own
  c10::intrusive_ptr<c10d::Store> keys;        // the same, of this start
  std::array<std::atomic<int>, engine::kChannels> waits;
  std::atomic<uint64_t> arrivals = 0;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<Known> known;
  uint64_t signs = 0;
  uint64_t round_ns = 0;  // when the store answered last
  bool refused = false;   // the keys there are another job's
  bool joined = false;
  bool leaving = false;
  bool look = false;  // at once
  bool ended = false;
  std::optional<Status> to_publish;
  Status failed;
  std::function<void()> act;  // once it is

  std::string store_name() const {
    const std::string server = environment.store_runs ? "torchrun's agent on that machine"
                               : joined               ? members[0].name()
                                                      : "rank 0";
    return fmt::format("the store at {}:{}, which {} serves,", environment.host, environment.port,
                       server);
  }

  double silent_s(uint32_t rank, uint64_t now_ns) const {
    const uint64_t then = known[rank].changed_ns;
    return then >= now_ns ? 0 : static_cast<double>(now_ns - then) * 1e-9;
  }

  /// The rank that keeps this rank waiting: the other one, or whom that one waits for in its turn.
  uint32_t awaited(size_t channel, uint32_t other) const {
    std::set<uint32_t> seen{environment.rank};
    while (seen.insert(other).second) {
      const Waits& theirs = known[other].waits;
      const int next =
          theirs[channel] != kNobody ? theirs[channel] : *std::ranges::max_element(theirs);
      if (next == kNobody || seen.contains(static_cast<uint32_t>(next))) break;
      other = static_cast<uint32_t>(next);
    }
    return other;
  }

  bool on_this_machine(uint32_t rank) const {
    return members[rank].machine == members[environment.rank].machine;
  }

  /// With the mutex held. Only the first one counts.
  void fail(Status why) {
    if (!failed.ok()) return;
    failed = std::move(why);
    if (act) act();
    changed.notify_all();
  }

  /// The failure for a store that has not answered for so long.
  Status silence_of_store() const {
    const double silent = base::seconds_since(round_ns);
    const auto state = !environment.store_runs && joined && on_this_machine(0)
                           ? process_state(members[0].process)
                           : std::optional<ProcessState>();
    return Status(ErrorCode::kTimeout,
                  fmt::format("{} has not answered for {:.1f} s{}", store_name(), silent,
                              state && state->letter == 'T' ? ": it is stopped" : ""),
                  kResume);
  }

  // Callers wait for the thread, which alone calls the store: a call may hang in a connection.
  Status publish_and_wait(std::unique_lock<std::mutex>& lock, Status why);

  // The thread. Errors: torch throws.
  void run();
  void meet();
  void watch();
  void publish(const Status& why);
  void sign();
  std::vector<std::string> read();
  void look_at(const std::vector<std::string>& values, uint64_t now_ns);
  std::optional<Status> judge(uint64_t now_ns) const;
  bool joined_ranks_have_left();
  void wait_for_others();
};

Status RankWatch::Shared::publish_and_wait(std::unique_lock<std::mutex>& lock, Status why) {
  if (!failed.ok()) return failed;
  to_publish = why;
  changed.notify_all();
  changed.wait_for(lock, 2 * between + std::chrono::seconds(1), [&] { return !failed.ok(); });
  fail(std::move(why));
  return failed;
}

/// The first failure of all ranks is theirs.
void RankWatch::Shared::publish(const Status& why) {
  const Status first = status_from(keys->compareSet(kFailure, kNone, to_text(why)));
  const std::scoped_lock lock(mutex);
  fail(first);
}

void RankWatch::Shared::sign() {
  std::string text;
  {
    const std::scoped_lock lock(mutex);
    text = leaving || !failed.ok() ? kLeft : fmt::format("{} {}", ++signs, arrivals.load());
    for (size_t channel = 0; text != kLeft && channel < waits.size(); ++channel) {
      text += fmt::format(" {}", waits[channel].load());
    }
  }
  keys->set(sign_key(environment.rank), text);
}

std::vector<std::string> RankWatch::Shared::read() {
  std::vector<std::string> names{kFailure};
  for (const RankMember& member : members) names.push_back(sign_key(member.rank));
  std::vector<std::string> values;
  for (const auto& value : keys->multiGet(names)) values.emplace_back(value.begin(), value.end());
  return values;
}

void RankWatch::Shared::look_at(const std::vector<std::string>& values, uint64_t now_ns) {
  const std::scoped_lock lock(mutex);
  round_ns = base::now_ns();
  for (uint32_t rank = 0; rank < members.size(); ++rank) {
    const std::string& sign = values[rank + 1];
    Known& of = known[rank];
    if (sign == of.sign) continue;
    of.sign = sign;
    of.changed_ns = now_ns;
    of.left = sign == kLeft;
    uint64_t number = 0;
    std::istringstream in(sign);
    if (of.left) continue;
    in >> number >> of.arrivals;
    for (int& wait : of.waits) in >> wait;
  }
  if (values[0] != kNone) fail(status_from(values[0]));
  changed.notify_all();
}

/// A rank that cannot live any more.
std::optional<Status> RankWatch::Shared::judge(uint64_t now_ns) const {
  for (uint32_t rank = 0; rank < members.size(); ++rank) {
    if (rank == environment.rank || known[rank].left) continue;
    const double silent = silent_s(rank, now_ns);
    std::optional<ProcessState> state;
    if (on_this_machine(rank)) {
      state = process_state(members[rank].process);
      const bool runs = state && state->started == members[rank].started && state->letter != 'Z';
      if (!runs) return Status(ErrorCode::kIo, members[rank].name() + " has ended", kResume);
    }
    if (silent < seconds(timeout)) continue;
    return Status(ErrorCode::kTimeout,
                  fmt::format("{} has given no sign of life for {:.1f} s{}", members[rank].name(),
                              silent, state && state->letter == 'T' ? ": it is stopped" : ""),
                  kResume);
  }
  return {};
}

void RankWatch::Shared::run() {
  try {
    meet();
    if (!refused) {
      watch();
      wait_for_others();
    }
  } catch (const std::exception& error) {
    const std::scoped_lock lock(mutex);
    fail(joined ? Status(ErrorCode::kIo,
                         fmt::format("{} is gone: {}", store_name(), without_lines(error.what())),
                         kResume)
                : Status(ErrorCode::kIo,
                         fmt::format("rank {} cannot reach {} {}", environment.rank, store_name(),
                                     without_lines(error.what())),
                         "Check MASTER_ADDR and MASTER_PORT, and that rank 0 has been started"));
  }
  const std::scoped_lock lock(mutex);
  ended = true;
  changed.notify_all();
}

void RankWatch::Shared::watch() {
  while (true) {
    sign();
    std::optional<Status> why;
    {
      const std::scoped_lock lock(mutex);
      if (leaving || !failed.ok()) return;
      why = std::exchange(to_publish, {});
    }
    const uint64_t now_ns = base::now_ns();
    if (why) publish(*why);
    look_at(read(), now_ns);
    if (const auto verdict = judge(now_ns)) publish(*verdict);
    std::unique_lock lock(mutex);
    changed.wait_for(lock, between, [&] { return leaving || look || to_publish || !failed.ok(); });
    look = false;
  }
}

/// Where not all have come.
bool RankWatch::Shared::joined_ranks_have_left() {
  for (uint32_t rank = 1; rank < environment.world; ++rank) {
    const bool came = keys->check({member_key(rank), sign_key(rank)});
    if (came && keys->get_to_str(sign_key(rank)) != kLeft) return false;
  }
  return true;
}

/// The store ends with this process, and what the others have to know is in it.
void RankWatch::Shared::wait_for_others() {
  if (environment.store_runs || environment.rank != 0) return;
  const auto until = std::chrono::steady_clock::now() +
                     std::min<Milliseconds>(timeout, 4 * between + std::chrono::seconds(2));
  while (std::chrono::steady_clock::now() < until) {
    if (!joined) {
      if (joined_ranks_have_left()) return;
      std::this_thread::sleep_for(kSignsMin);
      continue;
    }
    look_at(read(), base::now_ns());
    const bool all = std::ranges::all_of(members, [&](const RankMember& member) {
      if (member.rank == 0 || known[member.rank].left) return true;
      if (silent_s(member.rank, base::now_ns()) > seconds(timeout)) return true;  // it hangs
      const auto state = on_this_machine(member.rank) ? process_state(member.process)
                                                      : std::optional<ProcessState>{{'R', 0}};
      return !state || state->letter == 'Z';
    });
    if (all) return;
    std::this_thread::sleep_for(kSignsMin);
  }
}

RankWatch::RankWatch(std::shared_ptr<Shared> shared)
    : shared_(std::move(shared)), thread_([shared = shared_] { shared->run(); }) {}

RankWatch::~RankWatch() {
  std::unique_lock lock(shared_->mutex);
  shared_->leaving = true;
  shared_->changed.notify_all();
  // Longer than the thread takes, unless its connection hangs, which nothing can end.
  const bool hangs = !shared_->failed.ok() &&
                     base::seconds_since(shared_->round_ns) > seconds(3 * shared_->between);
  const Milliseconds most =
      hangs ? kSignsMin
            : std::min<Milliseconds>(shared_->timeout, std::chrono::seconds(30)) + kSignsMax;
  const bool ended = shared_->changed.wait_for(lock, most, [&] { return shared_->ended; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

namespace {

/// Names those of `world` ranks that have not come.
std::string missing_ranks(c10d::Store& store, uint32_t world) {
  std::string missing;
  for (uint32_t rank = 0; rank < world; ++rank) {
    if (store.check({member_key(rank)})) continue;
    missing += fmt::format("{}rank {}", missing.empty() ? "" : ", ", rank);
  }
  return missing;
}

/// The value of a key that whoever comes first sets.
std::string claim(c10d::Store& store, const std::string& key, const std::string& value) {
  const std::vector<uint8_t> there =
      store.compareSet(key, {}, std::vector<uint8_t>(value.begin(), value.end()));
  return {there.begin(), there.end()};
}

}  // namespace

void RankWatch::Shared::meet() {
  c10d::TCPStoreOptions options;
  options.port = environment.port;
  options.isServer = !environment.store_runs && environment.rank == 0;
  options.waitWorkers = false;
  options.timeout = timeout;
  connection = c10::make_intrusive<c10d::TCPStore>(environment.host, options);
  keys = c10::make_intrusive<c10d::PrefixStore>("smartinf/" + environment.start, connection);
  if (environment.rank == 0) keys->set(kFailure, std::string(kNone));
  const std::string me = to_text(this_process(environment.rank));
  if (const std::string there = claim(*keys, member_key(environment.rank), me); there != me) {
    const std::scoped_lock lock(mutex);
    refused = true;
    return fail(Status(
        ErrorCode::kBusy,
        fmt::format("another process is rank {} of the job at {}", environment.rank, store_name()),
        "Wait until that job has ended, or give this one another MASTER_PORT"));
  }
  keys->set(sign_key(environment.rank), std::string("0 -1 -1 -1 0"));
  const uint64_t began_ns = base::now_ns();
  const double timeout_s = seconds(timeout);
  while (true) {
    const std::string missing = missing_ranks(*keys, environment.world);
    if (missing.empty()) break;
    // Rank 0 has put it there, unless it is missing itself.
    const bool may_have_failed = keys->check({kFailure});
    if (base::seconds_since(began_ns) > timeout_s) {
      const Status why(ErrorCode::kTimeout,
                       fmt::format("of {} ranks these did not come to {} within {:.1f} s: {}",
                                   environment.world, store_name(), timeout_s, missing),
                       "See what those processes said, or set ranks.timeout higher");
      if (may_have_failed) return publish(why);
      const std::scoped_lock lock(mutex);
      return fail(why);
    }
    if (const std::string first = may_have_failed ? keys->get_to_str(kFailure) : kNone;
        first != kNone) {
      const std::scoped_lock lock(mutex);
      return fail(status_from(first));
    }
    std::this_thread::sleep_for(kSignsMin);
  }
  std::vector<RankMember> all;
  for (uint32_t rank = 0; rank < environment.world; ++rank) {
    all.push_back(member_from(rank, keys->get_to_str(member_key(rank))));
  }
  const std::scoped_lock lock(mutex);
  members = std::move(all);
  round_ns = base::now_ns();
  known.resize(environment.world);
  for (Known& one : known) one.changed_ns = round_ns;
  joined = true;
  changed.notify_all();
}

Result<std::unique_ptr<RankWatch>> RankWatch::join(const RankEnvironment& environment,
                                                   Milliseconds timeout) {
  auto shared = std::make_shared<Shared>();
  shared->environment = environment;
  shared->timeout = timeout;
  shared->between = std::clamp(timeout / 20, kSignsMin, kSignsMax);
  std::unique_ptr<RankWatch> watch(new RankWatch(shared));
  std::unique_lock lock(shared->mutex);
  // Connecting and meeting may each take as long.
  shared->changed.wait_for(lock, 2 * timeout + std::chrono::seconds(5),
                           [&] { return shared->joined || !shared->failed.ok(); });
  if (shared->joined) return watch;
  shared->fail(Status(ErrorCode::kTimeout, shared->store_name() + " does not answer",
                      "Check MASTER_ADDR and MASTER_PORT"));
  return shared->failed;
}

const std::vector<RankMember>& RankWatch::members() const { return shared_->members; }
uint32_t RankWatch::rank() const { return shared_->environment.rank; }
RankWatch::Milliseconds RankWatch::timeout() const { return shared_->timeout; }

c10::intrusive_ptr<c10d::Store> RankWatch::store(const std::string& prefix) const {
  auto connection = shared_->connection->clone();
  connection->setTimeout(shared_->timeout);
  return c10::make_intrusive<c10d::PrefixStore>(
      fmt::format("smartinf/{}/{}", shared_->environment.start, prefix), std::move(connection));
}

Status RankWatch::failure() const {
  const std::scoped_lock lock(shared_->mutex);
  if (shared_->failed.ok() && !shared_->ended) {
    const double silent = base::seconds_since(shared_->round_ns);
    if (silent > seconds(shared_->timeout)) {
      shared_->fail(shared_->silence_of_store());
    }
  }
  return shared_->failed;
}

void RankWatch::when_failed(std::function<void()> act) {
  const std::scoped_lock lock(shared_->mutex);
  shared_->act = std::move(act);
  if (!shared_->failed.ok() && shared_->act) shared_->act();
}

void RankWatch::report(const Status& why) {
  std::unique_lock lock(shared_->mutex);
  Status named = why;
  static_cast<void>(shared_->publish_and_wait(
      lock, std::move(named).with_context(shared_->members[shared_->environment.rank].name())));
}

void RankWatch::waits_for(engine::Channel channel, std::optional<uint32_t> rank) {
  shared_->waits[static_cast<size_t>(channel)] = rank ? static_cast<int>(*rank) : Shared::kNobody;
}

Status RankWatch::barrier_without_timeout() {
  Shared& shared = *shared_;
  const uint64_t mine = ++shared.arrivals;
  const auto all_here = [&] {
    return std::ranges::all_of(shared.members, [&](const RankMember& member) {
      return member.rank == shared.environment.rank || shared.known[member.rank].arrivals >= mine;
    });
  };
  std::unique_lock lock(shared.mutex);
  // Signs are read more often meanwhile: whoever came last is not waited for longer than that.
  for (Milliseconds pause{1}; !all_here(); pause = std::min(2 * pause, Milliseconds(100))) {
    if (!shared.failed.ok()) return shared.failed;
    shared.look = true;
    shared.changed.notify_all();
    shared.changed.wait_for(lock, pause, [&] { return !shared.failed.ok() || all_here(); });
    lock.unlock();
    SI_RETURN_IF_ERROR(failure());  // also where the store does not answer
    lock.lock();
  }
  return Status();
}

Status RankWatch::cause_of(engine::Channel channel, std::optional<uint32_t> other,
                           const std::string& what, bool timed_out) {
  Shared& shared = *shared_;
  std::unique_lock lock(shared.mutex);
  shared.look = true;
  shared.changed.notify_all();
  // A call that was not answered in time comes first: it breaks the calls of others.
  const Milliseconds grace =
      timed_out ? 2 * shared.between : 4 * shared.between + std::chrono::seconds(1);
  shared.changed.wait_for(lock, grace, [&] { return !shared.failed.ok(); });
  if (!shared.failed.ok()) return shared.failed;

  const uint64_t now_ns = base::now_ns();
  const double signs_s = seconds(3 * shared.between);
  if (base::seconds_since(shared.round_ns) > signs_s) {
    shared.fail(shared.silence_of_store());
    return shared.failed;
  }
  Status found(ErrorCode::kIo, "a connection between ranks has broken: " + what, kResume);
  for (const RankMember& member : shared.members) {
    const Shared::Known& known = shared.known[member.rank];
    if (member.rank == shared.environment.rank) continue;
    if (known.left) {
      found = Status(ErrorCode::kIo, member.name() + " has left the run", kResume);
      break;
    }
    if (const double silent = shared.silent_s(member.rank, now_ns); silent > signs_s) {
      found = Status(ErrorCode::kIo,
                     fmt::format("{} is gone: it has given no sign of life for {:.1f} s, and {}",
                                 member.name(), silent, what),
                     kResume);
      break;
    }
    if (timed_out && other && member.rank == shared.awaited(static_cast<size_t>(channel), *other)) {
      found = Status(ErrorCode::kTimeout,
                     fmt::format("{} lives, but the others have waited {:.1f} s for it",
                                 member.name(), seconds(shared.timeout)),
                     "See what it is busy with, or set ranks.timeout higher");
    }
  }
  return shared.publish_and_wait(lock, std::move(found));
}

}  // namespace smartinf::train
