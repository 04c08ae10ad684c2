#include "smartinf/model/weight_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/checksum.h"
#include "smartinf/base/file.h"
#include "smartinf/base/text.h"
#include "smartinf/kernels/update.h"
#include "smartinf/model/folder_file.h"
#include "smartinf/model/placeholder.h"

namespace smartinf::model {
namespace {

namespace fs = std::filesystem;
using base::DataType;
using base::ErrorCode;
using base::Result;
using base::Status;

constexpr std::string_view kIndex = "model.safetensors.index.json";
constexpr std::string_view kSingle = "model.safetensors";
constexpr uint64_t kIndexBytesMax = uint64_t{256} << 20;
constexpr uint64_t kPieceElements = uint64_t{1} << 16;  // elements that are cast at a time
constexpr std::string_view kGetAgain = "Get the model's folder again";

std::string shown(const std::string& name) { return base::printable(name) ? name : "?"; }

Status at(ErrorCode code, std::string what, std::string_view advice, const std::string& path) {
  return Status(code, std::move(what), std::string(advice), base::ErrorPlace{path, {}, {}, 0});
}

/// Tables that older versions of transformers stored beside the weights.
bool is_table(std::string_view name) {
  return name.ends_with(".rotary_emb.inv_freq") || name.ends_with(".attn.bias") ||
         name.ends_with(".attn.masked_bias");
}

/// The prefix that a checkpoint of the model without its head leaves out of every name.
std::string_view base_prefix(const Architecture& model) {
  return model.family == Family::kGpt2 ? "transformer." : "model.";
}

std::string shape_text(const std::vector<uint64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

/// Reads the index: by tensor the file that it is in.
Result<std::map<std::string, std::string>> read_index(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const std::string text,
                      base::read_text_file(path, "cannot read the index", kIndexBytesMax));
  const nlohmann::json json = base::parse_json(text);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    const auto placeholder = find_placeholder(text);
    return at(ErrorCode::kCorrupt,
              placeholder ? "the index is " + placeholder->what : "the index has no weight_map",
              placeholder ? placeholder->advice : kGetAgain, path);
  }
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    std::string name = file.is_string() ? file.get<std::string>() : "";
    // No path: what is beside the folder is not its own.
    if (!name.ends_with(".safetensors") || name.find('/') != std::string::npos ||
        name.starts_with(".") || !base::printable(name)) {
      return at(
          ErrorCode::kCorrupt,
          fmt::format("the index names a file for {} that is not in the folder", shown(tensor)),
          kGetAgain, path);
    }
    files.emplace(tensor, std::move(name));
  }
  return files;
}

/// Neither a file of weights nor an index is there: what is?
Status no_weights(const std::string& folder) {
  std::vector<std::string> others;
  std::error_code error;
  for (auto entry = fs::directory_iterator(folder, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::string name = entry->path().filename().string();
    const bool weights = name.ends_with(".safetensors") || name.ends_with(".gguf") ||
                         name.starts_with("pytorch_model") || name.ends_with(".pth");
    if (weights && base::printable(name)) others.push_back(std::move(name));
  }
  std::ranges::sort(others);
  const auto any = [&](auto matches) { return std::ranges::any_of(others, matches); };
  if (any([](const std::string& name) { return name.starts_with("pytorch_model"); })) {
    return at(ErrorCode::kUnsupported, "the folder has its weights in pickled files",
              "Load it with transformers and save it again: save_pretrained() writes safetensors",
              folder);
  }
  constexpr size_t kNamed = 3;
  const std::string what = "there is neither model.safetensors nor its index";
  if (others.empty()) {
    return at(ErrorCode::kNotFound, what,
              "Name a folder as transformers' save_pretrained() writes it", folder);
  }
  const bool shards =
      any([](const std::string& name) { return name.starts_with("model-00001-of-"); });
  if (others.size() > kNamed) others.erase(others.begin() + kNamed, others.end());
  return at(ErrorCode::kNotFound, fmt::format("{}, but {}", what, fmt::join(others, ", ")),
            shards ? "Download model.safetensors.index.json, which says what is in the files"
                   : "Load it with what wrote it and save it again as save_pretrained() does",
            folder);
}

/// The prefix of every name where another program has wrapped the model, by the name that a tensor
/// should have; empty: nothing does.
std::string wrapper_prefix(const std::string& name, std::string_view base,
                           const std::set<std::string>& names) {
  std::vector<std::string> ends{fmt::format(".{}", name)};
  if (name.starts_with(base)) ends.push_back(fmt::format(".{}", name.substr(base.size())));
  for (const std::string& found : names) {
    for (const std::string& end : ends) {
      if (!found.ends_with(end)) continue;
      const std::string first = found.substr(0, found.find('.') + 1);
      const bool all = std::ranges::all_of(
          names, [&](const std::string& other) { return other.starts_with(first); });
      if (all && first != base) return found.substr(0, found.size() - end.size() + 1);
    }
  }
  return "";
}

std::string_view unwrap_advice(std::string_view prefix) {
  if (prefix.find("base_model.model.") != prefix.npos) {
    return "They are peft's: merge the adapters (merge_and_unload()) and save that";
  }
  if (prefix.find("_orig_mod.") != prefix.npos) {
    return "They are torch.compile's: save the model within, model._orig_mod.save_pretrained()";
  }
  return "Save the model within what wraps it: model.module.save_pretrained()";
}

}  // namespace

// As transformers has it: the single file wins, whatever an index beside it says.
Status WeightFiles::find_files(const std::string& folder) {
  folder_ = folder;
  const auto find = [&](std::string_view name) -> Result<std::string> {
    SI_ASSIGN_OR_RETURN(const std::optional<std::string> path, find_folder_file(folder, name));
    return path.value_or("");
  };
  std::vector<std::string> names{std::string(kSingle)};
  const Result<std::string> single = find(kSingle);
  const bool dangles = single.status().code() == ErrorCode::kNotFound;
  if (!single.ok() && !dangles) return single.status();
  if (!single.ok() || single->empty()) {
    SI_ASSIGN_OR_RETURN(const std::string index, find(kIndex));
    if (index.empty()) return dangles ? single.status() : no_weights(folder);
    SI_ASSIGN_OR_RETURN(index_, read_index(index));
    std::set<std::string> files;
    for (const auto& [tensor, file] : index_) files.insert(file);
    names.clear();
    for (const std::string& file : files) names.push_back(file);
  }
  for (const std::string& name : names) {
    SI_ASSIGN_OR_RETURN(const std::string path, find(name));
    if (path.empty()) {
      return at(ErrorCode::kNotFound, fmt::format("{} names {}", kIndex, name),
                "Download the file; or remove the index if it is of other weights",
                folder + "/" + name);
    }
    SI_ASSIGN_OR_RETURN(base::DataFile file, base::DataFile::open(path));
    files_.push_back(std::move(file));
  }
  return Status();
}

/// Both name the same tensors: else one of them is of another save.
Status WeightFiles::check_index(size_t file, const SafetensorsHeader& header) const {
  if (index_.empty()) return Status();
  const std::string name = fs::path(files_[file].path()).filename().string();
  for (const auto& [tensor, entry] : header.tensors) {
    const auto named = index_.find(tensor);
    if (is_table(tensor) || (named != index_.end() && named->second == name)) continue;
    return at(ErrorCode::kMismatch,
              fmt::format("{} is in the file, but not in {}", shown(tensor), kIndex), kGetAgain,
              files_[file].path());
  }
  for (const auto& [tensor, of] : index_) {
    if (of != name || header.tensors.contains(tensor) || is_table(tensor)) continue;
    return at(ErrorCode::kMismatch,
              fmt::format("{} is in {}, but not in the file", shown(tensor), kIndex), kGetAgain,
              files_[file].path());
  }
  return Status();
}

Status WeightFiles::find_tensors(const Architecture& model) {
  struct Found {
    SafetensorsHeader::Entry entry;
    size_t file;
  };
  std::set<std::string> expected;
  for (const plan::ParameterRange& range : space_.ranges()) expected.insert(range.name);
  const std::string base(base_prefix(model));
  std::map<std::string, Found> found;
  for (size_t i = 0; i < files_.size(); ++i) {
    SI_ASSIGN_OR_RETURN(SafetensorsHeader header, SafetensorsHeader::read(files_[i]));
    SI_RETURN_IF_ERROR(check_index(i, header));
    for (auto& [name, entry] : header.tensors) {
      if (is_table(name)) continue;
      const std::string full = expected.contains(base + name) ? base + name : name;
      const bool once = found.emplace(full, Found{std::move(entry), i}).second;
      if (!once) {
        return at(ErrorCode::kCorrupt, fmt::format("{} is there twice", shown(name)), kGetAgain,
                  files_[i].path());
      }
    }
  }
  // Files of tied weights may have either name.
  const std::string& embedding = space_.ranges().front().name;
  const std::string head_name = "lm_head.weight";
  if (model.tied_head && !found.contains(embedding) && found.contains(head_name)) {
    auto head = found.extract(head_name);
    head.key() = embedding;
    found.insert(std::move(head));
  }
  const auto missing = [&](const std::string& name) {
    std::set<std::string> names;
    for (const auto& [other, tensor] : found) names.insert(other);
    const std::string prefix = wrapper_prefix(name, base, names);
    if (!prefix.empty()) {
      return at(
          ErrorCode::kMismatch,
          fmt::format("{} is in none of the files, whose names begin with {}", name, shown(prefix)),
          unwrap_advice(prefix), folder_);
    }
    return at(ErrorCode::kMismatch, fmt::format("{} is in none of the files", name),
              name == head_name
                  ? "Save the model with its head (AutoModelForCausalLM), or set "
                    "tie_word_embeddings to true in config.json if the head is the embedding"
                  : "Check that config.json and the weights belong together",
              folder_);
  };
  const auto place_of = [&](const std::string& name, const Found& tensor) -> Result<Place> {
    const std::optional<DataType> type = safetensors_type(tensor.entry.type);
    if (type.has_value()) return Place{tensor.file, tensor.entry.offset, *type};
    return at(ErrorCode::kUnsupported,
              fmt::format("{} is of type {}", shown(name), shown(tensor.entry.type)),
              "Weights of F32, BF16 and F16 can be read", files_[tensor.file].path());
  };
  for (const plan::ParameterRange& range : space_.ranges()) {
    const auto tensor = found.find(range.name);
    if (tensor == found.end()) return missing(range.name);
    if (tensor->second.entry.shape != range.shape) {
      return at(ErrorCode::kMismatch,
                fmt::format("{} is {}, and by config.json it would be {}", range.name,
                            shape_text(tensor->second.entry.shape), shape_text(range.shape)),
                "Check that config.json and the weights belong together",
                files_[tensor->second.file].path());
    }
    SI_ASSIGN_OR_RETURN(const Place place, place_of(range.name, tensor->second));
    places_.push_back(place);
    found.erase(tensor);
  }
  // A tied head that was stored nevertheless.
  if (const auto head = found.find(head_name); head != found.end() && model.tied_head) {
    if (head->second.entry.shape == space_.ranges().front().shape) {
      SI_ASSIGN_OR_RETURN(const Place place, place_of(head->first, head->second));
      SI_RETURN_IF_ERROR(check_tied_head(place));
      found.erase(head);
    }
  }
  if (found.empty()) return Status();
  return at(ErrorCode::kMismatch,
            fmt::format("{} is not part of a {} model of this config.json{}",
                        shown(found.begin()->first), base::enum_name(model.family),
                        found.size() > 1 ? fmt::format(", nor are {} more", found.size() - 1) : ""),
            "Check that config.json and the weights belong together",
            files_[found.begin()->second.file].path());
}

Status WeightFiles::check_tied_head(const Place& head) const {
  std::vector<float> one(kPieceElements);
  std::vector<float> other(kPieceElements);
  const uint64_t count = space_.ranges().front().count;
  for (uint64_t first = 0; first < count; first += kPieceElements) {
    const size_t here = std::min(kPieceElements, count - first);
    SI_RETURN_IF_ERROR(read_place(places_.front(), first, std::span(one).first(here)));
    SI_RETURN_IF_ERROR(read_place(head, first, std::span(other).first(here)));
    if (std::equal(one.begin(), one.begin() + here, other.begin())) continue;
    return at(ErrorCode::kMismatch,
              "lm_head.weight is not the embedding, but config.json says that they are "
              "tied",
              "Set tie_word_embeddings to false in config.json if the head is one of its own",
              folder_);
  }
  return Status();
}

Result<WeightFiles> WeightFiles::open(const std::string& folder, const Architecture& of) {
  const Architecture model = of.whole();
  WeightFiles files;
  SI_ASSIGN_OR_RETURN(files.space_, make_parameter_space(model));
  SI_RETURN_IF_ERROR(files.find_files(folder));
  SI_RETURN_IF_ERROR(files.find_tensors(model));
  return files;
}

std::optional<DataType> WeightFiles::type() const {
  for (const Place& place : places_) {
    if (place.type != places_.front().type) return std::nullopt;
  }
  return places_.front().type;
}

uint64_t WeightFiles::bytes() const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    bytes += space_.ranges()[i].count * base::data_type_bytes(places_[i].type);
  }
  return bytes;
}

Status WeightFiles::read_place(const Place& place, uint64_t within, std::span<float> out) const {
  const base::DataFile& file = files_[place.file];
  const uint64_t each = base::data_type_bytes(place.type);
  const uint64_t offset = place.offset + within * each;
  if (place.type == DataType::kF32) return file.read(offset, std::as_writable_bytes(out));
  std::vector<std::byte> raw(std::min<uint64_t>(kPieceElements, out.size()) * each);
  for (uint64_t done = 0; done < out.size(); done += kPieceElements) {
    const uint64_t count = std::min(kPieceElements, out.size() - done);
    SI_RETURN_IF_ERROR(file.read(offset + done * each, std::span(raw).first(count * each)));
    kernels::kernels().cast_to_f32(raw.data(), place.type, out.data() + done, count);
  }
  return Status();
}

Status WeightFiles::read_range(size_t i, uint64_t within, std::span<float> out) const {
  SI_RETURN_IF_ERROR(read_place(places_[i], within, out));
  const auto norm = kernels::kernels().partial_norm(out.data(), DataType::kF32, out.size());
  return norm.finite ? Status() : not_finite(i, within + norm.first_bad, out[norm.first_bad]);
}

Status WeightFiles::not_finite(size_t i, uint64_t within, float value) const {
  return at(ErrorCode::kCorrupt,
            fmt::format("element {} of {} is {}", within, space_.ranges()[i].name, value),
            "Get the model's folder again; a model with such weights cannot be trained",
            files_[places_[i].file].path());
}

Status WeightFiles::read_as(DataType type, uint64_t first, uint64_t count, std::byte* out) const {
  const uint64_t each = base::data_type_bytes(type);
  std::vector<float> piece;
  while (count > 0) {
    const size_t i = space_.index_at(first);
    const plan::ParameterRange& range = space_.ranges()[i];
    const uint64_t within = first - range.first;
    const bool as_it_is = places_[i].type == type;
    uint64_t here = std::min(count, range.count - within);
    if (as_it_is) {
      SI_RETURN_IF_ERROR(
          files_[places_[i].file].read(places_[i].offset + within * each, {out, here * each}));
    } else {
      here = std::min(here, kPieceElements);
      piece.resize(here);
      SI_RETURN_IF_ERROR(read_range(i, within, piece));
      kernels::kernels().cast_from_f32(piece.data(), out, type, here);
    }
    first += here;
    count -= here;
    out += here * each;
  }
  return Status();
}

Result<uint64_t> WeightFiles::digest(
    const std::function<Status(uint64_t, uint64_t)>& progress) const {
  constexpr uint64_t kPiece = uint64_t{2} << 20;  // elements
  const uint64_t total = bytes();
  uint64_t done = 0;
  uint64_t digest = 0;
  std::vector<std::byte> raw;
  for (size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    const uint64_t each = base::data_type_bytes(place.type);
    const uint64_t count = space_.ranges()[i].count;
    for (uint64_t first = 0; first < count; first += kPiece) {
      const uint64_t here = std::min(kPiece, count - first);
      raw.resize(here * each);
      SI_RETURN_IF_ERROR(files_[place.file].read(place.offset + first * each, raw));
      const auto norm = kernels::kernels().partial_norm(raw.data(), place.type, here);
      if (!norm.finite) {
        float value = 0;
        kernels::kernels().cast_to_f32(raw.data() + norm.first_bad * each, place.type, &value, 1);
        return not_finite(i, first + norm.first_bad, value);
      }
      digest = base::checksum(raw, base::mix_seed(digest, static_cast<uint64_t>(place.type)));
      done += raw.size();
      if (progress) SI_RETURN_IF_ERROR(progress(done, total));
    }
  }
  return digest;
}

Result<uint64_t> WeightFiles::digest_of_ends() const {
  constexpr uint64_t kEnd = uint64_t{1} << 20;  // of each file, at both ends
  uint64_t digest = 0;
  std::vector<std::byte> bytes;
  for (const base::DataFile& file : files_) {
    const uint64_t some = std::min(kEnd, file.size());
    for (const uint64_t offset : {uint64_t{0}, file.size() - some}) {
      bytes.resize(some);
      SI_RETURN_IF_ERROR(file.read(offset, bytes));
      digest = base::checksum(bytes) ^ (digest * 31 + file.size());
    }
  }
  return digest;
}

Status WeightFiles::read(uint64_t first, std::span<float> out) const {
  for (size_t i = space_.index_at(first); !out.empty(); ++i) {
    const plan::ParameterRange& range = space_.ranges()[i];
    const uint64_t within = first - range.first;
    const std::span<float> here = out.first(std::min<uint64_t>(out.size(), range.count - within));
    SI_RETURN_IF_ERROR(read_range(i, within, here));
    out = out.subspan(here.size());
    first += here.size();
  }
  return Status();
}

}  // namespace smartinf::model
