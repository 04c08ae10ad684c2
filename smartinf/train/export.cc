#include "smartinf/train/export.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/engine/updater.h"
#include "smartinf/train/corpus.h"
#include "smartinf/train/hugging_face.h"
#include "smartinf/train/memory_state.h"
#include "smartinf/train/parameter_groups.h"
#include "smartinf/train/parameters.h"
#include "smartinf/train/run_folder.h"
#include "smartinf/train/safetensors.h"

namespace smartinf::train {
namespace {

namespace fs = std::filesystem;
using base::DataType;
using base::ErrorCode;
using base::Result;
using base::Status;

// Consecutive ranges that share a file.
struct Shard {
  std::string name;
  std::vector<TensorInfo> tensors;
  uint64_t elements = 0;
};

std::vector<Shard> cut_into_shards(const plan::ParameterSpace& space, DataType type,
                                   uint64_t shard_bytes_max) {
  std::vector<Shard> shards;
  uint64_t bytes = 0;
  for (const plan::ParameterRange& range : space.ranges()) {
    TensorInfo tensor{range.name, type, range.shape};
    if (shards.empty() || bytes + tensor.bytes() > shard_bytes_max) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += tensor.bytes();
    shards.back().elements += range.count;
    shards.back().tensors.push_back(std::move(tensor));
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].name = shards.size() == 1
                         ? "model.safetensors"
                         : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  }
  return shards;
}

// Takes the whole space's elements in order, in pieces of any size.
class ShardStream {
 public:
  ShardStream(std::string folder, const std::vector<Shard>& shards)
      : folder_(std::move(folder)), shards_(shards) {}

  Status append(std::span<const float> elements) {
    while (!elements.empty()) {
      const Shard& shard = shards_[index_];
      if (writer_ == nullptr) {
        // transformers asks for the framework the tensors are meant for.
        SI_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                            SafetensorsWriter::create(folder_ + "/" + shard.name, shard.tensors,
                                                      {{"format", "pt"}}));
        writer_ = std::make_unique<SafetensorsWriter>(std::move(writer));
        left_ = shard.elements;
      }
      const size_t count = std::min<uint64_t>({elements.size(), left_, kPieceElements});
      SI_RETURN_IF_ERROR(append_cast(shard.tensors.front().type, elements.first(count)));
      elements = elements.subspan(count);
      left_ -= count;
      if (left_ == 0) {
        SI_RETURN_IF_ERROR(writer_->finish());
        writer_.reset();
        ++index_;
      }
    }
    return Status();
  }

  bool complete() const { return index_ == shards_.size(); }

 private:
  static constexpr uint64_t kPieceElements = uint64_t{1} << 16;

  Status append_cast(DataType type, std::span<const float> elements) {
    if (type == DataType::kF32) return writer_->append(std::as_bytes(elements));
    cast_.resize(elements.size());
    std::transform(elements.begin(), elements.end(), cast_.begin(),
                   [](float value) { return base::to_bf16(value); });
    return writer_->append(std::as_bytes(std::span(cast_)));
  }

  std::string folder_;
  const std::vector<Shard>& shards_;
  size_t index_ = 0;
  uint64_t left_ = 0;  // elements of the shard being written
  std::unique_ptr<SafetensorsWriter> writer_;
  std::vector<base::Bf16> cast_;
};

std::string index_json(const std::vector<Shard>& shards) {
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  uint64_t bytes = 0;
  for (const Shard& shard : shards) {
    for (const TensorInfo& tensor : shard.tensors) {
      map[tensor.name] = shard.name;
      bytes += tensor.bytes();
    }
  }
  return nlohmann::ordered_json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(
             2) +
         "\n";
}

// The folder while it is filled: beside the one asked for, which it becomes when it is complete. An
// export that fails leaves nothing; one that was killed leaves a folder that the next one removes.
class StagedFolder {
 public:
  static Result<StagedFolder> make(const std::string& out) {
    StagedFolder folder;
    folder.out_ = fs::path(out).lexically_normal();
    if (!folder.out_.has_filename()) folder.out_ = folder.out_.parent_path();
    folder.path_ = folder.out_.string() + ".partial";
    std::error_code error;
    if (fs::exists(folder.out_, error) &&
        !(fs::is_directory(folder.out_, error) && fs::is_empty(folder.out_, error))) {
      return in_the_way(folder.out_, "--out: there is something already");
    }
    if (fs::exists(folder.path_, error)) {
      if (!fs::exists(folder.path_ / kMark, error)) {
        return in_the_way(folder.path_, "--out: the folder to fill is in use for something else");
      }
      fs::remove_all(folder.path_, error);
      if (error) {
        return base::errno_status(error.value(), "cannot remove what an export left", folder.path_);
      }
    }
    fs::create_directories(folder.path_, error);
    if (error) {
      return base::errno_status(error.value(), "--out: cannot make the folder", folder.path_);
    }
    folder.made_ = true;
    SI_RETURN_IF_ERROR(write_file((folder.path_ / kMark).string(), ""));
    return folder;
  }

  StagedFolder(StagedFolder&& other) noexcept
      : out_(std::move(other.out_)),
        path_(std::move(other.path_)),
        made_(std::exchange(other.made_, false)) {}
  StagedFolder& operator=(StagedFolder&&) = delete;
  ~StagedFolder() {
    std::error_code ignored;
    if (made_) fs::remove_all(path_, ignored);
  }

  std::string path() const { return path_.string(); }

  Status finish() {
    std::error_code error;
    fs::remove(path_ / kMark, error);
    if (!error) fs::rename(path_, out_, error);  // over an empty folder, too
    if (error) return base::errno_status(error.value(), "--out: cannot rename to", out_);
    made_ = false;
    return Status();
  }

 private:
  static constexpr const char* kMark = ".smartinf-export";

  StagedFolder() = default;
  static Status in_the_way(const fs::path& path, std::string what) {
    base::ErrorPlace place;
    place.path = path.string();
    return Status(ErrorCode::kAlreadyExists, std::move(what),
                  "Choose another folder, or remove this one first", place);
  }

  fs::path out_;
  fs::path path_;
  bool made_ = false;
};

Result<std::string> read_text(const std::string& key, const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return base::errno_status(errno, key + ": cannot read the file", path);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// Streams master weights in ascending order into `take`; returns the step they are of.
Result<base::StepNumber> read_master(const Job& job, const plan::ParameterSpace& space,
                                     const std::function<Status(std::span<const float>)>& take) {
  if (job.options.train.where == OptimizerWhere::kMemory) {
    SI_ASSIGN_OR_RETURN(const MemoryState state, MemoryState::open(job.options.train.run, space));
    SI_RETURN_IF_ERROR(take(state.plane(0)));
    return state.step();
  }
  engine::UpdaterOptions options = job.updater;
  options.create = false;
  SI_ASSIGN_OR_RETURN(const std::unique_ptr<engine::Updater> updater,
                      engine::Updater::open(options, space));
  SI_RETURN_IF_ERROR(updater->read_weights(
      [&](uint64_t, std::span<const float> weights) { return take(weights); }));
  return updater->committed_step();
}

}  // namespace

Result<ExportSummary> export_run(const Job& job, const ExportOptions& options) {
  ModelOptions model = with_defaults(job.options.model);
  const DataOptions& data = job.options.data;
  // Token files do not say their vocabulary, so a run on them has it in its recipe.
  const bool bytes =
      data.tokenizer.empty() && (model.vocabulary == 0 || !data.paths.front().ends_with(".bin"));
  if (model.vocabulary == 0) model.vocabulary = kByteVocabulary;
  const DataType type = options.type.value_or(precision_data_type(job.options.train.precision));
  SI_ASSIGN_OR_RETURN(const plan::ParameterSpace whole, make_parameter_space(model));
  SI_ASSIGN_OR_RETURN(const GroupedParameters parameters,
                      group_parameters(whole, job.options.train));
  const plan::ParameterSpace& space = parameters.space;
  SI_ASSIGN_OR_RETURN(StagedFolder folder, StagedFolder::make(options.out));

  const std::vector<Shard> shards = cut_into_shards(space, type, options.shard_bytes_max);
  ShardStream stream(folder.path(), shards);
  ExportSummary summary;
  SI_ASSIGN_OR_RETURN(summary.step, read_master(job, space, [&](std::span<const float> elements) {
                        return stream.append(elements);
                      }));
  SI_CHECK(stream.complete(), "the updater visited less than the whole space");
  summary.parameters = space.count();

  const int64_t eos_token = bytes ? int64_t{kByteSeparator} : -1;
  std::vector<std::pair<std::string, std::string>> texts = {
      {"config.json", llama_config_json(model, data.sequence, type, eos_token)},
      {"generation_config.json", generation_config_json(eos_token)}};
  if (bytes) {
    texts.emplace_back("tokenizer.json", byte_tokenizer_json());
    texts.emplace_back("tokenizer_config.json",
                       tokenizer_config_json(data.sequence, kByteSeparatorText));
  } else if (!data.tokenizer.empty()) {
    SI_ASSIGN_OR_RETURN(std::string tokenizer, read_text("data.tokenizer", data.tokenizer));
    texts.emplace_back("tokenizer.json", std::move(tokenizer));
    texts.emplace_back("tokenizer_config.json", tokenizer_config_json(data.sequence, ""));
  }
  if (shards.size() > 1) texts.emplace_back("model.safetensors.index.json", index_json(shards));
  for (const auto& [name, text] : texts) {
    SI_RETURN_IF_ERROR(write_file(folder.path() + "/" + name, text));
    summary.files.push_back(name);
  }
  for (const Shard& shard : shards) summary.files.push_back(shard.name);
  SI_RETURN_IF_ERROR(folder.finish());
  return summary;
}

}  // namespace smartinf::train
