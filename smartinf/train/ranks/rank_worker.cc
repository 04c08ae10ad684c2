// One rank of several that only call each other, for tests/ranks_test.py.
//
//   rank_worker TIMEOUT_MS ROUNDS [fail|sleep|meet|late|chain AT]
//   rank_worker TIMEOUT_MS ROUNDS pipeline FORWARD_MS BACKWARD_MS ROWS WIDTH MICRO_BATCHES
//       [FORM WHEN RANK FORWARD]
//
// In each round every channel does every kind of call, among all ranks and among those with even
// numbers, and checks what comes. Prints "round N", at the end "done"; a failure goes to stderr
// with exit code 1. fail: this rank gives up in that round; sleep: it does not come to it; meet, on
// all ranks: they meet there without a limit in time; late: likewise, but after twice the timeout;
// chain, on all ranks: each waits for a message of the rank before it, and rank 1 sends none.
// pipeline: each rank is a stage whose computing sleeps (bench/pipeline_beside_torch.py); messages
// are [ROWS, WIDTH] bf16; what follows are compress.pipeline, pipeline_when, pipeline_rank and
// pipeline_forward. FORWARD_MS and BACKWARD_MS may be lists, "40,60", of each rank. Prints the
// seconds of each round, a step; before it those of making a short gradient and reading it,
// where there are any.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "smartinf/base/clock.h"
#include "smartinf/base/enum_names.h"
#include "smartinf/plan/pipeline_schedule.h"
#include "smartinf/train/ranks/join_ranks.h"
#include "smartinf/train/stage_link.h"

namespace smartinf::train {
namespace {

using base::ErrorCode;
using base::Status;
using engine::Channel;
using engine::Collectives;

/// Message of rank `from` to rank `to`: nothing, little, or much.
std::vector<std::byte> message(uint64_t round, Channel channel, uint32_t from, uint32_t to) {
  constexpr std::array<size_t, 4> kSizes{0, 1, 1000, 300'000};
  const uint64_t seed = round * 31 + static_cast<uint64_t>(channel) * 7 + from * 3 + to;
  std::vector<std::byte> bytes(kSizes[seed % kSizes.size()]);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(seed + i);
  return bytes;
}

Status wrong(const char* call) {
  return Status(ErrorCode::kCorrupt, std::string(call) + " brought other bytes than were sent");
}

Status exchange(Collectives& ranks, Channel channel, uint64_t round) {
  std::vector<std::byte> send;
  std::vector<std::byte> expected;
  std::vector<uint64_t> send_bytes;
  std::vector<uint64_t> receive_bytes;
  for (uint32_t other = 0; other < ranks.world(); ++other) {
    const auto out = message(round, channel, ranks.rank(), other);
    const auto in = message(round, channel, other, ranks.rank());
    send.insert(send.end(), out.begin(), out.end());
    expected.insert(expected.end(), in.begin(), in.end());
    send_bytes.push_back(out.size());
    receive_bytes.push_back(in.size());
  }
  std::vector<std::byte> received(expected.size());
  const auto root = static_cast<uint32_t>(round % ranks.world());
  const auto from_root = message(round, channel, root, root);
  std::vector<std::byte> broadcast(from_root.size());
  if (ranks.rank() == root) broadcast = from_root;
  // Both are under way at once.
  SI_ASSIGN_OR_RETURN(const auto all_to_all,
                      ranks.all_to_all(channel, send, send_bytes, received, receive_bytes));
  SI_ASSIGN_OR_RETURN(const auto to_all, ranks.broadcast(channel, broadcast, root));
  SI_RETURN_IF_ERROR(all_to_all->wait());
  if (received != expected) return wrong("all_to_all");
  SI_RETURN_IF_ERROR(to_all->wait());
  if (broadcast != from_root) return wrong("broadcast");
  SI_ASSIGN_OR_RETURN(const auto texts,
                      engine::all_gather(ranks, channel, "I am " + std::to_string(ranks.rank())));
  for (uint32_t other = 0; other < ranks.world(); ++other) {
    if (texts[other] != "I am " + std::to_string(other)) return wrong("all_gather");
  }
  return ranks.barrier(channel);
}

/// Two messages to the next rank and two from the one before, all under way at once.
Status pass_on(Collectives& ranks, Channel channel, uint64_t round) {
  const uint32_t next = (ranks.rank() + 1) % ranks.world();
  const uint32_t before = (ranks.rank() + ranks.world() - 1) % ranks.world();
  if (next == ranks.rank()) return Status();
  std::array<std::vector<std::byte>, 2> sent, received;
  std::vector<std::unique_ptr<Collectives::Pending>> pending;
  for (size_t i = 0; i < sent.size(); ++i) {
    sent[i] = message(round + i, channel, ranks.rank(), next);
    received[i].resize(message(round + i, channel, before, ranks.rank()).size());
    SI_ASSIGN_OR_RETURN(pending.emplace_back(), ranks.send(channel, sent[i], next));
    SI_ASSIGN_OR_RETURN(pending.emplace_back(), ranks.receive(channel, received[i], before));
  }
  for (const auto& one : pending) SI_RETURN_IF_ERROR(one->wait());
  for (size_t i = 0; i < received.size(); ++i) {
    if (received[i] != message(round + i, channel, before, ranks.rank())) return wrong("receive");
  }
  return Status();
}

Status wait_in_a_chain(Collectives& ranks) {
  if (ranks.rank() == 1) std::this_thread::sleep_for(std::chrono::hours(1));
  std::array<std::byte, 8> bytes{};
  SI_ASSIGN_OR_RETURN(
      const auto pending,
      ranks.receive(Channel::kControl, bytes, (ranks.rank() + ranks.world() - 1) % ranks.world()));
  return pending->wait();
}

Status work(Collectives& ranks, std::chrono::milliseconds timeout, uint64_t rounds,
            const std::string& trouble, uint64_t at) {
  std::vector<uint32_t> even;
  for (uint32_t rank = 0; rank < ranks.world(); rank += 2) even.push_back(rank);
  SI_ASSIGN_OR_RETURN(const std::shared_ptr<Collectives> group, ranks.group(even));
  for (uint64_t round = 0; round < rounds; ++round) {
    if (trouble == "fail" && round == at) {
      const Status broken(ErrorCode::kNoSpace, "the drive is full", "Make room");
      ranks.failed(broken);
      return broken;
    }
    if (trouble == "sleep" && round == at) std::this_thread::sleep_for(std::chrono::hours(1));
    if (trouble == "late" && round == at) std::this_thread::sleep_for(2 * timeout);
    if ((trouble == "late" || trouble == "meet") && round == at) {
      SI_RETURN_IF_ERROR(ranks.barrier_without_timeout());
    }
    if (trouble == "chain" && round == at) SI_RETURN_IF_ERROR(wait_in_a_chain(ranks));
    std::array<Status, engine::kChannels> made;
    {
      std::vector<std::jthread> threads;
      for (size_t channel = 0; channel < engine::kChannels; ++channel) {
        threads.emplace_back([&, channel] {
          const auto one = static_cast<Channel>(channel);
          Status& status = made[channel];
          status = exchange(ranks, one, round);
          if (status.ok()) status = pass_on(ranks, one, round);
          if (group == nullptr) return;
          if (status.ok()) status = exchange(*group, one, round);
          if (status.ok()) status = pass_on(*group, one, round);
        });
      }
    }
    for (Status& status : made) SI_RETURN_IF_ERROR(std::move(status));
    std::printf("round %llu\n", static_cast<unsigned long long>(round));
    std::fflush(stdout);
  }
  return Status();
}

/// "40", or "40,60" with a number for each rank.
std::chrono::milliseconds of_rank(const std::string& list, uint32_t rank) {
  std::stringstream numbers(list);
  std::string number;
  std::getline(numbers, number, ',');
  for (std::string next; rank > 0 && std::getline(numbers, next, ','); --rank) number = next;
  return std::chrono::milliseconds(std::stoull(number));
}

Status pipeline(const Ranks& ranks, uint64_t rounds, std::span<const std::string> arguments) {
  using Way = StageLink::Way;
  const uint32_t stage = ranks.rank();
  const std::chrono::milliseconds forward_time = of_rank(arguments[0], stage);
  const std::chrono::milliseconds backward_time = of_rank(arguments[1], stage);
  const std::vector<int64_t> sizes{std::stoll(arguments[2]), std::stoll(arguments[3])};
  const uint64_t count = std::stoull(arguments[4]);
  StageCompression compression;
  if (arguments.size() > 8) {
    compression.form = base::enum_from_name<GradientForm>(arguments[5]).value();
    compression.when = base::enum_from_name<CompressWhen>(arguments[6]).value();
    compression.rank = static_cast<uint32_t>(std::stoul(arguments[7]));
    compression.forward = base::enum_from_name<ActivationForm>(arguments[8]).value();
  }
  const uint32_t stages = ranks.world();
  StageLink::Ends ends;
  if (stage > 0) ends.before = stage - 1;
  if (stage + 1 < stages) ends.behind = stage + 1;
  const auto ahead = plan::kPipelineAheadMax;
  for (uint32_t one = 0; one < stages; ++one) ends.column.push_back(one);
  StageLink link(ranks.collectives(), ends, torch::dtype(torch::kBFloat16),
                 plan::pipeline_in_flight(stages, 0, count, ahead), compression);
  torch::manual_seed(1);
  const auto message = torch::randn(sizes, torch::kFloat32).to(torch::kBFloat16);
  if (compression.form != GradientForm::kNone) {
    GradientCodec codec(compression);
    std::vector<double> seconds;
    for (int i = 0; i < 5; ++i) {
      codec.begin_step();  // the first one of a step takes longer
      if (compression.when == CompressWhen::kAlways) codec.compress(message);
      const uint64_t begin_ns = base::now_ns();
      decompress(compression, codec.compress(message), sizes, torch::kBFloat16);
      seconds.push_back(base::seconds_since(begin_ns));
    }
    std::ranges::sort(seconds);
    std::printf("%.6f\n", seconds[2]);
  }
  for (uint64_t round = 0; round < rounds; ++round) {
    SI_RETURN_IF_ERROR(ranks.barrier());
    const uint64_t begin_ns = base::now_ns();
    link.begin_step(count);
    if (ends.before) link.expect(Way::kForward, sizes, count, 1 + ahead);
    if (ends.behind) link.expect(Way::kBackward, sizes, count, 1 + ahead);
    for (const auto& action : plan::pipeline_actions(stages, stage, count, ahead)) {
      const bool forward = action.kind == plan::PipelineAction::Kind::kForward;
      const Way way = forward ? Way::kForward : Way::kBackward;
      if (forward ? ends.before : ends.behind) link.receive(way);
      std::this_thread::sleep_for(forward ? forward_time : backward_time);
      if (forward ? ends.behind : ends.before) link.send(way, message);
    }
    link.finish();
    SI_RETURN_IF_ERROR(ranks.barrier());
    std::printf("%.6f\n", base::seconds_since(begin_ns));
  }
  return Status();
}

Status run(std::vector<std::string> arguments) {
  arguments.resize(std::max<size_t>(5, arguments.size()));
  SI_ASSIGN_OR_RETURN(const auto environment, rank_environment());
  if (!environment) return Status(ErrorCode::kInvalidArgument, "one process alone");
  const std::chrono::milliseconds timeout(std::stoull(arguments[1]));
  SI_ASSIGN_OR_RETURN(const Ranks joined, join_ranks(*environment, timeout));
  if (arguments[3] == "pipeline") {
    return pipeline(joined, std::stoull(arguments[2]), std::span(arguments).subspan(4));
  }
  std::printf("joined as %s, %u of %u here\n", joined.name(joined.rank()).c_str(),
              joined.local_rank(), joined.local_world());
  std::fflush(stdout);
  return work(*joined.collectives(), timeout, std::stoull(arguments[2]), arguments[3],
              arguments[4].empty() ? 0 : std::stoull(arguments[4]));
}

}  // namespace
}  // namespace smartinf::train

int main(int count, char** arguments) {
  const smartinf::base::Status status = smartinf::train::run({arguments, arguments + count});
  if (status.ok()) {
    std::printf("done\n");
  } else {
    std::fprintf(stderr, "%s\n", status.to_string().c_str());
  }
  return status.ok() ? 0 : 1;
}
