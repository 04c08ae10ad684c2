#include "smartinf/train/model_weights.h"

#include "smartinf/train/scalar_type.h"

namespace smartinf::train {

using base::Status;

torch::TensorOptions ModelWeights::tensor_options() const {
  return torch::dtype(scalar_type(type_)).device(accelerator());
}

Status ModelWeights::load(engine::Updater& updater, const Layout& layout) {
  SI_ASSIGN_OR_RETURN(const plan::ParameterSpace space,
                      model::make_parameter_space(layout.architecture));
  if (updater.tables() != nullptr) {
    table_ = std::make_unique<EmbeddingTable>(*updater.tables(), layout.architecture, type_,
                                              accelerator());
  }
  model_ = std::make_unique<Model>(layout.architecture, space, tensor_options(), layout.positions,
                                   frozen(), table_.get());
  engine::WeightSource* source = &updater;
  if (frozen()) source = frozen_.get();
  stream_ = std::make_unique<LayerStream>(*source, *model_, copies_, type_, layout.placement,
                                          layout.several_ranks, layout.only);
  trained_ = stream_.get();
  if (frozen()) {
    adapters_ = std::make_unique<Adapters>(updater, layout.targets, layout.lora, model_->units(),
                                           accelerator(), type_);
    trained_ = adapters_.get();
    SI_RETURN_IF_ERROR(adapters_->load());
  }
  return stream_->load();
}

}  // namespace smartinf::train
