#include "smartinf/train/stage_link.h"

#include <functional>
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
                     const torch::TensorOptions& activations, uint64_t in_flight,
                     const StageCompression& compression)
    : ranks_(std::move(ranks)),
      ends_(std::move(ends)),
      activations_(activations),
      in_flight_(in_flight),
      compression_(compression),
      codec_(compression),
      compressor_("si-stages", [](const std::function<void()>& work) { work(); }) {
  while (stage_ + 1 < ends_.column.size() && ends_.column[stage_] != ranks_->rank()) ++stage_;
}

void StageLink::begin_step(uint64_t micro_batches) {
  micro_batches_ = micro_batches;
  awaited_ = sent_ = 0;
  codec_.begin_step();
}

bool StageLink::is_compressed(size_t stage, uint64_t micro_batch) const {
  return train::is_compressed(compression_, static_cast<uint32_t>(ends_.column.size()),
                              static_cast<uint32_t>(stage), micro_batches_, micro_batch);
}

void StageLink::wait(Message& message) {
  const uint64_t begin_ns = base::now_ns();
  if (message.started.valid()) throw_if_error(message.started.get());
  throw_if_error(message.pending->wait());
  waited_s_ += base::seconds_since(begin_ns);
}

void StageLink::post(Way way) {
  Line& from = line(way);
  const auto& rank = way == Way::kForward ? ends_.before : ends_.behind;
  const bool compressed = compression_.form != GradientForm::kNone && way == Way::kBackward &&
                          is_compressed(stage_ + 1, awaited_++);
  Tensor tensor =
      compressed ? torch::empty({static_cast<int64_t>(compressed_bytes(compression_, from.sizes))},
                                torch::kUInt8)
                 : torch::empty(from.sizes, activations_.device(torch::kCPU));
  const std::lock_guard lock(starting_);
  auto started = ranks_->receive(channel_of(way), bytes_of(tensor), rank.value());
  throw_if_error(started.status());
  from.receiving.push_back({std::move(tensor), std::move(*started), compressed});
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
  Message message = std::move(from.receiving.front());
  from.receiving.pop_front();
  wait(message);
  if (from.to_post > 0) post(way);
  if (message.compressed) {
    message.tensor = decompress(compression_, message.tensor, from.sizes,
                                c10::typeMetaToScalarType(activations_.dtype()));
  }
  return message.tensor.to(activations_.device());
}

void StageLink::start_send(Line& to, Channel channel, const Tensor& tensor, uint32_t rank,
                           std::optional<bool> compress) {
  while (to.sending.size() >= in_flight_) {
    wait(to.sending.front());
    to.sending.pop_front();
  }
  Tensor here = tensor.detach().to(torch::kCPU).contiguous();
  Message& message = to.sending.emplace_back();
  message.tensor = std::move(here);
  if (!compress) {
    sent_bytes_ += message.tensor.nbytes();
    return throw_if_error(send_now(message, channel, rank));
  }
  const torch::Tensor& values = message.tensor;
  sent_bytes_ +=
      *compress ? compressed_bytes(compression_, {values.sizes().data(), values.sizes().size()})
                : values.nbytes();
  auto work = std::make_shared<std::packaged_task<base::Status()>>(
      [this, &message, channel, rank, compress] {
        if (*compress) message.tensor = codec_.compress(message.tensor);
        return send_now(message, channel, rank);
      });
  message.started = work->get_future();
  compressor_.post([work] { (*work)(); });
}

base::Status StageLink::send_now(Message& message, Channel channel, uint32_t to) {
  const std::lock_guard lock(starting_);
  auto started = ranks_->send(channel, bytes_of(message.tensor), to);
  if (started.ok()) message.pending = std::move(*started);
  return started.status();
}

void StageLink::send(Way way, const Tensor& tensor) {
  const auto& rank = way == Way::kForward ? ends_.behind : ends_.before;
  std::optional<bool> compress;
  if (way == Way::kBackward && compression_.form != GradientForm::kNone) {
    compress = is_compressed(stage_, sent_++);
  }
  start_send(line(way), channel_of(way), tensor, rank.value(), compress);
}

void StageLink::finish() {
  for (Line& to : lines_) {
    for (; !to.sending.empty(); to.sending.pop_front()) wait(to.sending.front());
  }
}

Tensor StageLink::from_last(const Tensor& mine, int64_t size) {
  if (ends_.column.back() == ranks_->rank()) {
    for (const uint32_t rank : ends_.column) {
      if (rank != ranks_->rank()) start_send(line(Way::kBackward), Channel::kBackward, mine, rank);
    }
    return mine;
  }
  Tensor tensor = torch::empty({size}, activations_.device(torch::kCPU));
  auto started = ranks_->receive(Channel::kBackward, bytes_of(tensor), ends_.column.back());
  throw_if_error(started.status());
  Message message{tensor, std::move(*started)};
  wait(message);
  return tensor.to(activations_.device());
}

}  // namespace smartinf::train
