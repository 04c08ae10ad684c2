#include "smartinf/train/saved_tensors.h"

#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/plan/training_memory.h"

namespace smartinf::train {

using torch::Tensor;

namespace {

/// Smaller ones cost more to keep track of than they take.
constexpr size_t kSmallBytes = base::kKiB;

thread_local SavedTensors* recording = nullptr;

const std::byte* begin_of(const Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

/// All bytes of a storage as a tensor.
Tensor bytes_of(const c10::Storage& storage) {
  return torch::empty({0}, torch::dtype(torch::kUInt8).device(storage.device()))
      .set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

}  // namespace

struct SavedTensorHooks final : torch::autograd::SavedVariableHooks {
  explicit SavedTensorHooks(std::shared_ptr<SavedTensors> of) : owner(std::move(of)) {}

  void call_pack_hook(const Tensor& tensor) override {
    if (!owner->record(tensor, view)) stays = tensor.detach();
  }
  Tensor call_unpack_hook() override { return stays.defined() ? stays : owner->find(view); }

  std::shared_ptr<SavedTensors> owner;
  SavedTensors::View view;
  Tensor stays;
};

namespace {

/// Torch's own engine, which knows hooks on saved tensors from Python alone.
class Engine final : public torch::autograd::Engine {
 public:
  static torch::autograd::Engine& instance() {
    static Engine engine;
    return engine;
  }
  ~Engine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (recording == nullptr) return nullptr;
    return std::make_unique<SavedTensorHooks>(recording->shared_from_this());
  }
};

}  // namespace

void watch_saved_tensors() { torch::autograd::set_default_engine_stub(&Engine::instance); }

SavedTensors::Recording::Recording(SavedTensors& to, const Tensor& weights_N, const Tensor& input,
                                   std::vector<Tensor> others) {
  SI_CHECK(recording == nullptr, "saved tensors are recorded already");
  to.weights_ = weights_N;
  to.input_ = input;
  to.others_ = std::move(others);
  recording = &to;
}

SavedTensors::Recording::~Recording() {
  recording->weights_ = recording->input_ = Tensor();
  recording->others_.clear();
  recording = nullptr;
}

bool SavedTensors::record(const Tensor& tensor, View& view) {
  const c10::Storage& storage = tensor.storage();
  view.sizes = tensor.sizes().vec();
  view.strides = tensor.strides().vec();
  view.options = tensor.options();
  const std::byte* begin = begin_of(tensor);
  const std::byte* weights = begin_of(weights_);
  if (begin >= weights && begin < weights + weights_.nbytes()) {
    view.place = Place::kWeights;
    view.offset_bytes = begin - weights;
    return true;
  }
  if (storage.is_alias_of(input_.storage())) {
    view.place = Place::kInput;
    view.offset_bytes = begin - begin_of(input_);
    return true;
  }
  if (storage.nbytes() < kSmallBytes) return false;
  for (const Tensor& other : others_) {
    if (other.defined() && storage.is_alias_of(other.storage())) return false;
  }
  const std::byte* from = static_cast<const std::byte*>(storage.data());
  for (const Stored& stored : stored_) {
    if (!stored.storage.is_alias_of(storage)) continue;
    view.offset_bytes = static_cast<int64_t>(stored.offset_bytes) + (begin - from);
    return true;
  }
  view.offset_bytes = static_cast<int64_t>(bytes_) + (begin - from);
  stored_.push_back({storage, bytes_});
  bytes_ += base::round_up(storage.nbytes(), plan::kSavedAlignment);
  return true;
}

std::vector<SpooledBuffers::Part> SavedTensors::give_up() {
  std::vector<SpooledBuffers::Part> parts;
  for (const Stored& stored : std::exchange(stored_, {})) {
    parts.push_back({bytes_of(stored.storage), stored.offset_bytes});
  }
  return parts;
}

void SavedTensors::found_in(const Tensor& kept_N, const Tensor& weights_N, const Tensor& input) {
  kept_ = kept_N;
  weights_ = weights_N;
  input_ = input;
}

Tensor SavedTensors::find(const View& view) const {
  const Tensor& in = view.place == Place::kWeights ? weights_
                     : view.place == Place::kInput ? input_
                                                   : kept_;
  SI_CHECK(in.defined(), "a saved tensor is wanted outside of its backward");
  return torch::from_blob(static_cast<std::byte*>(in.data_ptr()) + view.offset_bytes, view.sizes,
                          view.strides, view.options);
}

}  // namespace smartinf::train
