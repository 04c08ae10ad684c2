#include "smartinf/train/export.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/engine/checkpoint_folder.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/updater.h"
#include "smartinf/kernels/row_rules.h"
#include "smartinf/model/config_json.h"
#include "smartinf/model/safetensors.h"
#include "smartinf/model/weight_files.h"
#include "smartinf/train/adapter_base.h"
#include "smartinf/train/corpus.h"
#include "smartinf/train/hugging_face.h"
#include "smartinf/train/memory_state.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/parameter_groups.h"
#include "smartinf/train/run_folder.h"
#include "smartinf/train/token_file.h"

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
  std::vector<model::TensorInfo> tensors;
  uint64_t bytes = 0;
};

std::vector<Shard> cut_into_shards(std::vector<model::TensorInfo> tensors,
                                   uint64_t shard_bytes_max) {
  std::vector<Shard> shards;
  for (model::TensorInfo& tensor : tensors) {
    const uint64_t bytes = tensor.bytes();
    if (shards.empty() || shards.back().bytes + bytes > shard_bytes_max) shards.emplace_back();
    shards.back().bytes += bytes;
    shards.back().tensors.push_back(std::move(tensor));
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].name = shards.size() == 1
                         ? "model.safetensors"
                         : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  }
  return shards;
}

// Takes the bytes of all tensors in order, in pieces of any size, or elements that are cast to
// them.
class ShardStream {
 public:
  ShardStream(std::string folder, const std::vector<Shard>& shards)
      : folder_(std::move(folder)), shards_(shards) {}

  Status append(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      SI_RETURN_IF_ERROR(open_shard());
      const size_t count = std::min<uint64_t>(bytes.size(), left_);
      SI_RETURN_IF_ERROR(writer_->append(bytes.first(count)));
      bytes = bytes.subspan(count);
      SI_RETURN_IF_ERROR(written(count));
    }
    return Status();
  }
  Status append(std::span<const float> elements) {
    while (!elements.empty()) {
      SI_RETURN_IF_ERROR(open_shard());
      const model::TensorInfo& tensor = shards_[index_].tensors.front();
      const size_t count =
          std::min<uint64_t>({elements.size(), left_ / tensor.element_bytes(), kPieceElements});
      SI_RETURN_IF_ERROR(writer_->append(tensor.type, elements.first(count)));
      elements = elements.subspan(count);
      SI_RETURN_IF_ERROR(written(count * tensor.element_bytes()));
    }
    return Status();
  }

  bool complete() const { return index_ == shards_.size(); }

 private:
  static constexpr uint64_t kPieceElements = uint64_t{1} << 16;

  Status open_shard() {
    if (writer_ != nullptr) return Status();
    const Shard& shard = shards_[index_];
    // transformers asks for the framework the tensors are meant for.
    SI_ASSIGN_OR_RETURN(model::SafetensorsWriter writer,
                        model::SafetensorsWriter::create(folder_ + "/" + shard.name, shard.tensors,
                                                         {{"format", "pt"}}));
    writer_ = std::make_unique<model::SafetensorsWriter>(std::move(writer));
    left_ = shard.bytes;
    return Status();
  }
  Status written(uint64_t bytes) {
    left_ -= bytes;
    if (left_ > 0) return Status();
    SI_RETURN_IF_ERROR(writer_->finish());
    writer_.reset();
    ++index_;
    return Status();
  }

  std::string folder_;
  const std::vector<Shard>& shards_;
  size_t index_ = 0;
  uint64_t left_ = 0;  // bytes of the shard being written
  std::unique_ptr<model::SafetensorsWriter> writer_;
};

std::string index_json(const std::vector<Shard>& shards) {
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  uint64_t bytes = 0;
  for (const Shard& shard : shards) {
    for (const model::TensorInfo& tensor : shard.tensors) {
      map[tensor.name] = shard.name;
      bytes += tensor.bytes();
    }
  }
  return nlohmann::ordered_json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(
             2) +
         "\n";
}

/// Its lock says that the export is going on; a partial folder without it is nobody's.
constexpr std::string_view kMark = ".smartinf-export";
constexpr const char* kConfigFile = "config.json";
constexpr std::string_view kPartialSuffix = ".partial";

bool is_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

/// "model-00001-of-00002.safetensors" and the other files that an export is made of, finished or
/// not.
bool is_export_file(std::string_view name) {
  if (name.ends_with(kPartialSuffix)) name.remove_suffix(kPartialSuffix.size());
  constexpr std::array<std::string_view, 4> kNames = {kMark, "config.json", "model.safetensors",
                                                      "model.safetensors.index.json"};
  if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) return true;
  if (std::find(kTokenizerFiles.begin(), kTokenizerFiles.end(), name) != kTokenizerFiles.end()) {
    return true;
  }
  constexpr std::string_view kBegin = "model-";
  constexpr std::string_view kMiddle = "-of-";
  constexpr std::string_view kEnd = ".safetensors";
  const size_t middle = name.find(kMiddle);
  if (!name.starts_with(kBegin) || !name.ends_with(kEnd) || middle == std::string_view::npos) {
    return false;
  }
  name.remove_suffix(kEnd.size());
  return is_digits(name.substr(kBegin.size(), middle - kBegin.size())) &&
         is_digits(name.substr(middle + kMiddle.size()));
}

/// Its files, where it is a partial export and nothing else; else nothing.
std::vector<fs::path> files_of_partial(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  if (!folder.string().ends_with(kPartialSuffix) ||
      fs::symlink_status(folder, error).type() != fs::file_type::directory ||
      fs::symlink_status(folder / kMark, error).type() != fs::file_type::regular) {
    return {};
  }
  auto entries = fs::directory_iterator(folder, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    std::error_code unknown;
    const bool file = entries->symlink_status(unknown).type() == fs::file_type::regular;
    if (!file || !is_export_file(entries->path().filename().string())) return {};
    files.push_back(entries->path());
  }
  return error ? std::vector<fs::path>() : files;
}

/// Locks the mark of the folder, which whoever fills the folder does. Not open: it cannot be had.
storage::FileDescriptor lock_mark(const fs::path& folder, int flags) {
  storage::FileDescriptor mark(
      ::open((folder / kMark).c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | flags, 0644));
  // Where the file system knows no locks a name that is random keeps exports apart.
  const bool locked =
      mark.is_open() && (::flock(mark.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK);
  return locked ? std::move(mark) : storage::FileDescriptor();
}

// The folder while it is filled: beside the one asked for, which it becomes when it is complete. An
// export that fails leaves nothing; one that was killed leaves a folder that the next one removes.
class StagedFolder {
 public:
  static Result<StagedFolder> make(const std::string& out) {
    StagedFolder folder;
    folder.out_ = fs::path(out).lexically_normal();
    if (!folder.out_.has_filename()) folder.out_ = folder.out_.parent_path();
    std::error_code error;
    if (fs::exists(folder.out_, error) &&
        !(fs::is_directory(folder.out_, error) && fs::is_empty(folder.out_, error))) {
      return in_the_way(folder.out_, "--out: there is something already");
    }
    const std::string parent = engine::parent_folder(folder.out_.string());
    SI_RETURN_IF_ERROR(engine::make_durable_folder(parent).with_context("--out"));
    remove_leftovers(parent, folder.out_.filename().string());
    // A name of its own: two exports to one place do not mix, and the second one is refused.
    folder.path_ =
        fmt::format("{}.{:08x}{}", folder.out_.string(), std::random_device{}(), kPartialSuffix);
    if (::mkdir(folder.path_.c_str(), 0777) != 0) {
      return base::errno_status(errno, "--out: cannot make the folder", folder.path_);
    }
    folder.mark_ = lock_mark(folder.path_, O_CREAT | O_EXCL);
    folder.made_ = true;
    if (folder.mark_.is_open()) return folder;
    return base::errno_status(errno, "--out: cannot write in the folder", folder.path_);
  }

  StagedFolder(StagedFolder&& other) noexcept
      : out_(std::move(other.out_)),
        path_(std::move(other.path_)),
        mark_(std::move(other.mark_)),
        made_(std::exchange(other.made_, false)) {}
  StagedFolder& operator=(StagedFolder&&) = delete;
  ~StagedFolder() {
    std::error_code ignored;
    if (made_) fs::remove_all(path_, ignored);  // made by this object
  }

  std::string path() const { return path_.string(); }

  /// All files in it are durable already.
  Status finish() {
    SI_RETURN_IF_ERROR(engine::sync_folder(path()));
    // A folder is renamed in the place of an empty one only.
    if (::rename(path_.c_str(), out_.c_str()) != 0) {
      if (errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR) {
        return in_the_way(out_, "--out: there is something by now");
      }
      return base::errno_status(errno, "--out: cannot rename to", out_);
    }
    made_ = false;
    std::error_code error;
    fs::remove(out_ / kMark, error);
    if (error)
      return base::errno_status(error.value(),
                                "--out: cannot delete the mark of an incomplete export", out_);
    SI_RETURN_IF_ERROR(engine::sync_folder(out_.string()));
    return engine::sync_folder(engine::parent_folder(out_.string()));
  }

 private:
  StagedFolder() = default;
  static Status in_the_way(const fs::path& path, std::string what) {
    base::ErrorPlace place;
    place.path = path.string();
    return Status(ErrorCode::kAlreadyExists, std::move(what),
                  "Choose another folder, or remove this one first", place);
  }

  /// Removes what killed exports to the same place have left. Whatever is not theirs stays.
  static void remove_leftovers(const std::string& parent, const std::string& name) {
    std::vector<std::string> leftovers;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(parent, error)) {
      const std::string other = entry.path().filename().string();
      if (other.starts_with(name + ".") && other.ends_with(kPartialSuffix)) {
        leftovers.push_back(entry.path().string());
      }
    }
    for (const std::string& leftover : leftovers) {
      if (look_at_partial_export(leftover) != PartialExport::kLeftover) continue;
      if (const Status removed = remove_partial_export(leftover); !removed.ok()) {
        base::log(base::LogLevel::kWarning, removed.to_string());
      }
    }
  }

  fs::path out_;
  fs::path path_;
  storage::FileDescriptor mark_;
  bool made_ = false;
};

/// A tokenizer's text, and not of whatever file the recipe names.
Result<std::string> read_tokenizer(const std::string& path) {
  Result<std::string> text = base::read_text_file(path, "cannot read it", kTokenizerBytesMax);
  if (!text.ok()) return std::move(text).status().with_context("data.tokenizer");
  // Contents of the members are not looked at, and take no memory.
  const auto outline = nlohmann::json::parse(
      *text, [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) { return depth <= 1; },
      /*allow_exceptions=*/false);
  const auto is_object = [&](const char* member) {
    const auto found = outline.find(member);
    return found != outline.end() && found->is_object();
  };
  if (outline.is_object() && is_object("model") &&
      (outline.contains("added_tokens") || outline.contains("version"))) {
    return text;
  }
  return Status(ErrorCode::kInvalidArgument, "data.tokenizer: the file is not a tokenizer.json",
                "Name the tokenizer.json of Hugging Face's tokenizers that the token files were "
                "made with",
                base::ErrorPlace{path, {}, {}, 0});
}

/// State that a run has committed.
struct Committed {
  base::StepNumber step = 0;
  std::string client_metadata;
};

/// Weights of all rows of the run's table in order, some at a time.
Status read_rows(engine::Updater& updater, uint64_t dim,
                 const std::function<Status(std::span<const float>)>& take) {
  SI_ASSIGN_OR_RETURN(const engine::StoredRun stored, stored_table(updater));
  const csd::TableShape& table = stored.tables->tables().tables.front();
  std::vector<float> weights;
  return stored.tables->read(0, 0, table.rows, /*initial=*/true,
                             [&](uint64_t, std::span<const std::byte> records) {
                               const uint64_t bytes = table.record_bytes();
                               weights.resize(records.size() / bytes * dim);
                               for (size_t row = 0; row * bytes < records.size(); ++row) {
                                 kernels::read_weights(records.subspan(row * bytes, bytes), dim,
                                                       DataType::kF32, weights.data() + row * dim);
                               }
                               return take(weights);
                             });
}

// Streams master weights in ascending order into `take`, those of rows of table_dim (0: there is no
// table) before the others.
Result<Committed> read_master(const Job& job, const plan::ParameterSpace& space, uint64_t table_dim,
                              const std::function<Status(std::span<const float>)>& take) {
  if (job.options.train.where == OptimizerWhere::kMemory) {
    SI_ASSIGN_OR_RETURN(const MemoryState state, MemoryState::open(job.options.train.run, space));
    SI_RETURN_IF_ERROR(take(state.plane(0)));
    return Committed{state.step(), state.client_metadata()};
  }
  engine::UpdaterOptions options = job.updater;
  options.create = false;
  SI_ASSIGN_OR_RETURN(
      const std::unique_ptr<engine::Updater> updater,
      engine::Updater::open(options, space, engine::local_sources(options, /*read_only=*/true)));
  if (table_dim > 0) SI_RETURN_IF_ERROR(read_rows(*updater, table_dim, take));
  SI_RETURN_IF_ERROR(updater->read_weights(
      [&](uint64_t, std::span<const float> weights) { return take(weights); }));
  return Committed{updater->committed_step(), updater->client_metadata()};
}

}  // namespace

PartialExport look_at_partial_export(const std::string& folder) {
  if (files_of_partial(folder).empty()) return PartialExport::kForeign;
  return lock_mark(folder, 0).is_open() ? PartialExport::kLeftover : PartialExport::kInUse;
}

Status remove_partial_export(const std::string& folder) {
  const base::ErrorPlace place{folder, {}, {}, 0};
  const storage::FileDescriptor mark = lock_mark(folder, 0);
  const std::vector<fs::path> files = files_of_partial(folder);
  if (files.empty()) {
    return Status(ErrorCode::kFailedPrecondition,
                  "the folder is not an export, or holds other files as well; nothing was deleted",
                  "Check what it is, or name another folder", place);
  }
  if (!mark.is_open()) {
    return Status(ErrorCode::kBusy, "another process is writing this export",
                  "Wait until it is done", place);
  }
  for (const fs::path& file : files) {
    if (::unlink(file.c_str()) != 0 && errno != ENOENT) {
      return base::errno_status(errno, "cannot delete", file.string());
    }
  }
  if (::rmdir(folder.c_str()) == 0) return Status();
  return base::errno_status(errno, "cannot delete", folder);
}

namespace {

/// config.json and the tokenizer's files: those that the run was given, else its own.
Result<TextFiles> describe_model(const Job& job, const ModelSource& source, DataType type) {
  const DataOptions& data = job.options.data;
  std::string tokenizer;
  if (!data.tokenizer.empty()) {
    SI_ASSIGN_OR_RETURN(tokenizer, read_tokenizer(data.tokenizer));
  }
  TextFiles texts;
  if (!source.config_json.empty()) {
    SI_ASSIGN_OR_RETURN(texts, kept_tokenizer_files(job.options.train.run));
    if (!tokenizer.empty()) {
      std::erase_if(texts, [](const auto& file) { return file.first == "tokenizer.json"; });
      texts.emplace_back("tokenizer.json", std::move(tokenizer));
    }
    texts.emplace_back(kConfigFile, model::with_type(source.config_json, type));
    return texts;
  }
  // Token files do not say their vocabulary, so a run on them has it in its recipe.
  const bool bytes = data.tokenizer.empty() &&
                     (job.options.model.vocabulary == 0 || !is_token_file(data.paths.front()));
  const int64_t eos_token = bytes ? int64_t{kByteSeparator} : -1;
  texts = {{"config.json", model::write_config(source.architecture, type, eos_token)},
           {"generation_config.json", generation_config_json(eos_token)}};
  if (bytes) {
    texts.emplace_back("tokenizer.json", byte_tokenizer_json());
    texts.emplace_back("tokenizer_config.json",
                       tokenizer_config_json(data.sequence, kByteSeparatorText));
  } else if (!tokenizer.empty()) {
    texts.emplace_back("tokenizer.json", std::move(tokenizer));
    texts.emplace_back("tokenizer_config.json", tokenizer_config_json(data.sequence, ""));
  }
  return texts;
}

}  // namespace

namespace {

/// Every element of a space in order, into `take`.
using ReadAll =
    std::function<Result<Committed>(const std::function<Status(std::span<const float>)>&)>;

// Contents of the export: which parameters, and where their values come from.
struct Contents {
  plan::ParameterSpace space;
  ReadAll read;
};

/// The model's weights with what its adapters add: W + scale B A.
Result<Contents> merged(const Job& job, const ModelSource& source,
                        std::vector<model::LoraTarget> targets,
                        const plan::ParameterSpace& trained) {
  Contents contents;
  SI_ASSIGN_OR_RETURN(contents.space, model::make_parameter_space(source.architecture));
  std::vector<float> adapters;
  SI_ASSIGN_OR_RETURN(Committed committed,
                      read_master(job, trained, 0, [&](std::span<const float> elements) {
                        adapters.insert(adapters.end(), elements.begin(), elements.end());
                        return Status();
                      }));
  SI_ASSIGN_OR_RETURN(
      model::WeightFiles opened,
      open_adapter_base(job.options.model.from, source.architecture, committed.client_metadata));
  const auto files = std::make_shared<model::WeightFiles>(std::move(opened));
  contents.read =
      [&job, files, space = contents.space, targets = std::move(targets),
       adapters = std::move(adapters), committed = std::move(committed),
       transposed = source.architecture.transposed](
          const std::function<Status(std::span<const float>)>& take) -> Result<Committed> {
    const model::LoraOptions& lora = job.options.lora;
    std::vector<float> values;
    for (const plan::ParameterRange& range : space.ranges()) {
      const auto target = std::ranges::find_if(targets, [&](const model::LoraTarget& one) {
        return range.name == one.module + ".weight";
      });
      constexpr uint64_t kPiece = uint64_t{1} << 22;
      const uint64_t columns = range.shape.size() == 2 ? range.shape[1] : range.count;
      const uint64_t rows = std::max<uint64_t>(1, kPiece / columns);
      for (uint64_t first = 0; first < range.count; first += rows * columns) {
        values.resize(std::min(rows * columns, range.count - first));
        SI_RETURN_IF_ERROR(files->read(range.first + first, values));
        if (target != targets.end()) {
          model::add_lora(*target, lora, adapters, transposed, first / columns, values);
        }
        SI_RETURN_IF_ERROR(take(values));
      }
    }
    return committed;
  };
  return contents;
}

/// Adapters are written without their model, but they name its folder.
void check_named_base(const Job& job, const ModelSource& source, const Committed& committed) {
  const std::string& folder = job.options.model.from;
  std::error_code error;
  if (!fs::exists(fs::path(folder) / kConfigFile, error)) return;
  const Status same =
      open_adapter_base(folder, source.architecture, committed.client_metadata).status();
  if (same.ok()) return;
  base::log(base::LogLevel::kWarning,
            "the adapters name a model's folder that they do not fit: " + same.to_string());
}

/// As transformers has it: what config.json names, else what the folder's files have. Errors: those
/// of model::WeightFiles::open().
Result<DataType> type_of_model(const Job& job, const ModelSource& source) {
  if (source.type) return *source.type;
  const DataType other = precision_data_type(job.options.train.precision);
  if (source.folder.empty() || job.options.model.init == ModelInit::kRandom) return other;
  const auto files = model::WeightFiles::open(job.options.model.from, source.architecture);
  if (files.ok()) return files->type().value_or(other);
  return Status(
      files.status().code(),
      "config.json names no type of weights, and the files that have one cannot be read: " +
          files.status().what(),
      "Give --type bf16, f16 or f32", files.status().place());
}

}  // namespace

Result<std::vector<std::string>> write_model_folder(const std::string& out, ModelContents contents,
                                                    uint64_t shard_bytes_max) {
  SI_ASSIGN_OR_RETURN(StagedFolder folder, StagedFolder::make(out));
  const bool single = !contents.single_file.empty();
  if (!contents.read_bytes) {
    for (const plan::ParameterRange& range : contents.space.ranges()) {
      contents.tensors.push_back({range.name, contents.type, range.shape});
    }
  }
  std::vector<Shard> shards =
      cut_into_shards(std::move(contents.tensors), single ? ~uint64_t{0} : shard_bytes_max);
  if (single) shards.front().name = contents.single_file;
  ShardStream stream(folder.path(), shards);
  const auto append = [&](auto values) { return stream.append(values); };
  SI_RETURN_IF_ERROR(contents.read_bytes ? contents.read_bytes(append) : contents.read(append));
  SI_CHECK(stream.complete(), "less than the whole space was written");

  TextFiles& texts = contents.texts;
  if (shards.size() > 1) texts.emplace_back("model.safetensors.index.json", index_json(shards));
  std::vector<std::string> files;
  for (const auto& [name, text] : texts) {
    SI_RETURN_IF_ERROR(
        base::write_text_file(folder.path() + "/" + name, text, "cannot write the export"));
    files.push_back(name);
  }
  for (const Shard& shard : shards) files.push_back(shard.name);
  SI_RETURN_IF_ERROR(folder.finish());
  return files;
}

Result<ExportSummary> export_run(const Job& job, const ExportOptions& options) {
  SI_ASSIGN_OR_RETURN(ModelSource source, find_model(job.options));
  if (source.architecture.vocabulary == 0) source.architecture.vocabulary = kByteVocabulary;
  const bool lora = job.options.lora.on();
  if (options.merge && !lora) {
    return Status(ErrorCode::kInvalidArgument, "--merge: the run has no adapters", "Leave it out");
  }
  DataType type = DataType::kF32;
  if (options.type) {
    type = *options.type;
  } else {
    SI_ASSIGN_OR_RETURN(type, type_of_model(job, source));
  }
  std::vector<model::LoraTarget> targets;
  GroupedParameters parameters;
  plan::ParameterSpace whole;
  if (lora) {
    SI_ASSIGN_OR_RETURN(targets, model::lora_targets(source.architecture, job.options.lora));
    SI_ASSIGN_OR_RETURN(whole, model::lora_space(targets, job.options.lora.rank));
    SI_ASSIGN_OR_RETURN(parameters, group_parameters(whole, job.options.train));
  } else {
    SI_ASSIGN_OR_RETURN(whole, model::make_parameter_space(source.architecture.whole()));
    SI_ASSIGN_OR_RETURN(parameters, group_model(source.architecture, job.options.train));
  }
  ExportSummary summary;
  summary.adapters = lora && !options.merge;
  // Before the weights are read.
  SI_ASSIGN_OR_RETURN(TextFiles texts, describe_model(job, source, type));
  const uint64_t table_dim = source.architecture.table_embedding ? source.architecture.width : 0;
  Contents contents{
      whole, [&](const auto& take) { return read_master(job, parameters.space, table_dim, take); }};
  if (options.merge) {
    SI_ASSIGN_OR_RETURN(contents, merged(job, source, targets, parameters.space));
  }
  if (summary.adapters) {
    std::erase_if(texts, [](const auto& file) { return file.first == kConfigFile; });
    texts.emplace_back(
        "adapter_config.json",
        model::lora_config(source.architecture, job.options.lora, targets, job.options.model.from));
  }
  uint64_t done = 0;
  const auto read = [&](const std::function<Status(std::span<const float>)>& take) -> Status {
    SI_ASSIGN_OR_RETURN(
        const Committed committed, contents.read([&](std::span<const float> elements) -> Status {
          SI_RETURN_IF_ERROR(take(elements));
          done += elements.size();
          return options.progress ? options.progress(done, contents.space.count()) : Status();
        }));
    summary.step = committed.step;
    if (summary.adapters) check_named_base(job, source, committed);
    return Status();
  };
  const std::string name = summary.adapters ? "adapter_model.safetensors" : "";
  SI_ASSIGN_OR_RETURN(
      summary.files,
      write_model_folder(options.out, {contents.space, type, std::move(texts), name, read},
                         options.shard_bytes_max));
  summary.parameters = contents.space.count();
  return summary;
}

}  // namespace smartinf::train
