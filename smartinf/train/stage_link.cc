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

StageCompression of_activations(const StageCompression& compression) {
  StageCompression form;
  if (compression.forward == ActivationForm::kInt8) form.form = GradientForm::kInt8;
  form.feedback = ErrorFeedback::kNone;
  return form;
}

}  // namespace

StageLink::StageLink(std::shared_ptr<engine::Collectives> ranks, Ends ends,
                     const torch::TensorOptions& activations, uint64_t in_flight,
                     const StageCompression& compression)
    : ranks_(std::move(ranks)),
      ends_(std::move(ends)),
      activations_(activations),
      in_flight_(in_flight),
      lines_{{of_activations(compression), GradientCodec(of_activations(compression))},
             {compression, GradientCodec(compression)}},
      compressor_("si-stages", [](const std::function<void()>& work) { work(); }) {
  while (stage_ + 1 < ends_.column.size() && ends_.column[stage_] != ranks_->rank()) ++stage_;
}

void StageLink::begin_step(uint64_t micro_batches) {
  micro_batches_ = micro_batches;
  for (Line& one : lines_) {
    one.awaited = one.sent = 0;
    one.codec.begin_step();
  }
}

bool StageLink::shortens(const Line& line) const {
  return micro_batches_ > 0 && line.form.form != GradientForm::kNone;
}

bool StageLink::is_short(Way way, size_t stage, uint64_t micro_batch) const {
  return way == Way::kForward ||
         is_compressed(lines_[1].form,
                       static_cast<uint32_t>(ends_.column.size()) + (ends_.folds ? 1 : 0),
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
  const bool in_short = shortens(from) && is_short(way, stage_ + 1, from.awaited++);
  Tensor tensor =
      in_short ? torch::empty({static_cast<int64_t>(compressed_bytes(from.form, from.sizes))},
                              torch::kUInt8)
               : torch::empty(from.sizes, activations_.device(torch::kCPU));
  const std::lock_guard lock(starting_);
  auto started = ranks_->receive(channel_of(way), bytes_of(tensor), rank.value());
  throw_if_error(started.status());
  from.receiving.push_back({std::move(tensor), std::move(*started), in_short});
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
  if (message.is_short) {
    message.tensor = decompress(from.form, message.tensor, from.sizes,
                                c10::typeMetaToScalarType(activations_.dtype()));
  }
  return message.tensor.to(activations_.device());
}

void StageLink::start_send(Way way, const Tensor& tensor, uint32_t rank,
                           std::optional<bool> shorten) {
  Line& to = line(way);
  const Channel channel = channel_of(way);
  while (to.sending.size() >= in_flight_) {
    wait(to.sending.front());
    to.sending.pop_front();
  }
  Tensor here = tensor.detach().to(torch::kCPU).contiguous();
  Message& message = to.sending.emplace_back();
  message.tensor = std::move(here);
  if (!shorten) {
    sent_bytes_ += message.tensor.nbytes();
    return throw_if_error(send_now(message, channel, rank));
  }
  const torch::Tensor& values = message.tensor;
  sent_bytes_ += *shorten
                     ? compressed_bytes(to.form, {values.sizes().data(), values.sizes().size()})
                     : values.nbytes();
  auto work = std::make_shared<std::packaged_task<base::Status()>>(
      [this, &message, &codec = to.codec, channel, rank, shorten] {
        if (*shorten) message.tensor = codec.compress(message.tensor);
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
  Line& to = line(way);
  std::optional<bool> shorten;
  // What the first stage sends back is a folded head's, behind the last stage.
  const size_t stage = stage_ == 0 ? ends_.column.size() : stage_;
  if (shortens(to)) shorten = is_short(way, stage, to.sent++);
  start_send(way, tensor, rank.value(), shorten);
}

void StageLink::finish() {
  for (Line& to : lines_) {
    for (; !to.sending.empty(); to.sending.pop_front()) wait(to.sending.front());
  }
  micro_batches_ = 0;
}

Tensor StageLink::from_head(const Tensor& mine, int64_t size) {
  const uint32_t head = ends_.folds ? ends_.column.front() : ends_.column.back();
  if (head == ranks_->rank()) {
    for (const uint32_t rank : ends_.column) {
      if (rank != ranks_->rank()) start_send(Way::kBackward, mine, rank);
    }
    return mine;
  }
  Tensor tensor = torch::empty({size}, activations_.device(torch::kCPU));
  auto started = ranks_->receive(Channel::kBackward, bytes_of(tensor), head);
  throw_if_error(started.status());
  Message message{tensor, std::move(*started)};
  wait(message);
  return tensor.to(activations_.device());
}

}  // namespace smartinf::train
