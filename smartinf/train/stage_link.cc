#include "smartinf/train/stage_link.h"

#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/base/clock.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using engine::Channel;
using torch::Tensor;

namespace {

Channel channel_of(StageLink::Way way) {
  return way == StageLink::Way::kForward ? Channel::kForward : Channel::kBackward;
}

std::span<std::byte> bytes_of(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

}  // namespace

StageLink::StageLink(std::shared_ptr<engine::Collectives> ranks, Ends ends,
                     const torch::TensorOptions& activations, uint64_t in_flight)
    : ranks_(std::move(ranks)),
      ends_(std::move(ends)),
      activations_(activations),
      in_flight_(in_flight) {}

void StageLink::wait(engine::Collectives::Pending& pending) {
  const uint64_t begin_ns = base::now_ns();
  throw_if_error(pending.wait());
  waited_s_ += base::seconds_since(begin_ns);
}

void StageLink::post(Way way) {
  Line& from = line(way);
  const auto& rank = way == Way::kForward ? ends_.before : ends_.behind;
  Tensor tensor = torch::empty(from.sizes, activations_.device(torch::kCPU));
  auto started = ranks_->receive(channel_of(way), bytes_of(tensor), rank.value());
  throw_if_error(started.status());
  from.receiving.push_back({std::move(tensor), std::move(*started)});
  --from.to_post;
}

void StageLink::expect(Way way, std::vector<int64_t> sizes, uint64_t count, uint64_t at_once) {
  Line& from = line(way);
  SI_CHECK(from.to_post == 0 && from.receiving.empty(), "messages of a step before are left");
  from.sizes = std::move(sizes);
  from.to_post = count;
  while (from.to_post > 0 && from.receiving.size() < at_once) post(way);
}

Tensor StageLink::receive(Way way) {
  Line& from = line(way);
  SI_CHECK(!from.receiving.empty(), "a message that nobody expects");
  const Message message = std::move(from.receiving.front());
  from.receiving.pop_front();
  wait(*message.pending);
  if (from.to_post > 0) post(way);
  return message.tensor.to(activations_.device());
}

void StageLink::start_send(Line& to, Channel channel, const Tensor& tensor, uint32_t rank) {
  while (to.sending.size() >= in_flight_) {
    wait(*to.sending.front().pending);
    to.sending.pop_front();
  }
  Tensor here = tensor.detach().to(torch::kCPU).contiguous();
  auto started = ranks_->send(channel, bytes_of(here), rank);
  throw_if_error(started.status());
  sent_bytes_ += here.nbytes();
  to.sending.push_back({std::move(here), std::move(*started)});
}

void StageLink::send(Way way, const Tensor& tensor) {
  const auto& rank = way == Way::kForward ? ends_.behind : ends_.before;
  start_send(line(way), channel_of(way), tensor, rank.value());
}

void StageLink::finish() {
  for (Line& to : lines_) {
    for (; !to.sending.empty(); to.sending.pop_front()) wait(*to.sending.front().pending);
  }
}

Tensor StageLink::from_last(const Tensor& mine, int64_t size) {
  if (last()) {
    for (const uint32_t rank : ends_.column) {
      if (rank != ranks_->rank()) start_send(line(Way::kBackward), Channel::kBackward, mine, rank);
    }
    return mine;
  }
  Tensor tensor = torch::empty({size}, activations_.device(torch::kCPU));
  auto started = ranks_->receive(Channel::kBackward, bytes_of(tensor), ends_.column.back());
  throw_if_error(started.status());
  wait(**started);
  return tensor.to(activations_.device());
}

}  // namespace smartinf::train
