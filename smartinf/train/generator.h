// Continues texts with a model that was trained: that of a run, as its devices hold it, or that of
// a folder of Hugging Face's. Needs torch to link, not to include.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/key_value_store.h"
#include "smartinf/engine/options.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/options.h"
#include "smartinf/train/sampling.h"
#include "smartinf/train/sequence_decoder.h"

namespace smartinf::train {

struct GeneratorOptions {
  /// Options of the run; of a folder model.from names it, and train.run is empty.
  Options options;
  engine::UpdaterOptions updater;      // of a run: its devices
  std::optional<base::DataType> type;  // bf16 or f32; default: the run's, or as the folder has it
  std::string accelerator = "auto";
  uint32_t threads = 0;            // of torch's operators; 0: all cores
  uint64_t host_bytes = 0;         // of the whole process; 0: what is free
  uint64_t accelerator_bytes = 0;  // likewise
};

/// What a generator takes memory for.
struct DecodeNeeds {
  uint64_t sequences = 0;  // that it continues at a time
  uint64_t longest = 0;    // tokens of the longest one, new ones among them
  bool fewer = false;      // sequences do as well, down to one, where memory does not suffice
  bool own_store = false;  // decoder() is given one
  /// Host memory that the store of keys and values will take for so many sequences, of those that
  /// were asked for. shape: key_value_shape(). The last call is of those that are planned.
  std::function<uint64_t(const engine::KeyValueShape& shape, uint64_t sequences)> store_bytes;
};

/// Threads: one caller. Errors: as values; what torch throws is caught and named.
class Generator {
 public:
  /// Looks at the model's small files. Errors: of find_model(); kUnsupported for an accelerator
  /// that is not here.
  static base::Result<std::unique_ptr<Generator>> open(GeneratorOptions options);
  virtual ~Generator() = default;

  virtual const ModelSource& source() const = 0;
  virtual TextForm text_form() const = 0;

  /// Opens the weights and takes into memory what of them stays there, beside keys and values of
  /// sequences of so many tokens each, in memory. Nothing on the devices changes. Errors:
  /// kOutOfMemory with what is needed; kNotFound where the run has no state; kBusy while the run is
  /// going on; those of model::WeightFiles and of the devices.
  virtual base::Status load(std::span<const uint64_t> tokens) = 0;
  /// The same for keys and values in a store that decoder() is given.
  virtual base::Status load(const DecodeNeeds& needs) = 0;
  /// After load(): host memory that may be used, and for which it has no use.
  virtual uint64_t memory_left() const = 0;
  /// Lines for people, after load(): model, memory, what every token reads.
  virtual std::vector<std::string> describe() const = 0;
  /// After load(): what the tokens behind a prompt follow from beside it, each by a name for
  /// people. Reads all weights of a folder; progress: of bytes, its failure ends it.
  using Progress = std::function<base::Status(uint64_t done, uint64_t total)>;
  virtual base::Result<std::vector<std::pair<std::string, std::string>>> identity(
      const Progress& progress) const = 0;
  /// After load(), for sequences that are not longer than it was told: as decode(). What a prompt
  /// is continued with does not depend on the other ones. prompts: not empty, tokens below the
  /// vocabulary. Errors: kCancelled, those of the devices.
  virtual base::Status generate(std::span<const std::vector<int64_t>> prompts,
                                const DecodeOptions& options, const TakeToken& take) = 0;

  /// After load(): what a store for this model holds, in the type of its weights.
  virtual engine::KeyValueShape key_value_shape() const = 0;
  struct DecoderOptions {
    /// Of key_value_shape(), in any format; null: in memory, as much as load() was told.
    std::unique_ptr<engine::KeyValueStore> store;
    std::optional<kernels::CacheFormat> format;  // in memory; none: that of key_value_shape()
    bool store_works_beside = false;  // on devices: it attends while the model computes
    std::stop_token stop;             // ends the call that is under way with kCancelled
  };
  /// After load(), which it does not outlive; one at a time. Errors: kUnsupported: a store beside
  /// an accelerator.
  virtual base::Result<std::unique_ptr<SequenceDecoder>> decoder(DecoderOptions options) = 0;
};

}  // namespace smartinf::train
