// Where graphs come from.
#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <random>
#include <string_view>
#include <unordered_map>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/file.h"
#include "smartinf/graph/generators.h"

#include "workloads/gnn/graph_folder.h"

namespace smartinf::workloads {

using base::ErrorCode;
using base::Result;
using base::Status;
using graph::Edge;
using graph::Vertex;

namespace {

uint64_t hash_of(std::string_view text) {
  return base::checksum(std::as_bytes(std::span(text.data(), text.size())));
}

/// Output of a command; empty where it cannot be run.
std::string output_of(const char* command) {
  std::string text;
  FILE* const pipe = ::popen(command, "re");
  if (pipe == nullptr) return text;
  std::array<char, 1 << 16> some;
  while (const size_t count = std::fread(some.data(), 1, some.size(), pipe)) {
    text.append(some.data(), count);
  }
  ::pclose(pipe);
  return text;
}

/// A field of a package's record: its lines, without the name.
std::string_view field_of(std::string_view record, std::string_view name) {
  size_t at = record.starts_with(name) ? 0 : record.find(std::string("\n").append(name));
  if (at == std::string_view::npos) return {};
  at += name.size() + (at > 0 ? 1 : 0);
  size_t end = record.find('\n', at);
  while (end != std::string_view::npos && end + 1 < record.size() && record[end + 1] == ' ') {
    end = record.find('\n', end + 1);
  }
  return record.substr(at, end == std::string_view::npos ? end : end - at);
}

/// Each name of "a (>= 1), b | c:any".
template <typename F>
void each_package(std::string_view depends, const F& f) {
  while (!depends.empty()) {
    const size_t end = std::min(depends.find_first_of(",|"), depends.size());
    std::string_view one = depends.substr(0, end);
    depends.remove_prefix(std::min(end + 1, depends.size()));
    const size_t first = one.find_first_not_of(" \n");
    if (first == std::string_view::npos) continue;
    one.remove_prefix(first);
    f(one.substr(0, one.find_first_of(" (:\n")));
  }
}

/// Words of a text, hashed to places with a sign, as a vector of length 1.
void add_words(std::string_view text, std::span<float> features) {
  std::string word;
  const auto end_word = [&] {
    if (word.size() > 2) {
      const uint64_t hash = hash_of(word);
      features[hash % features.size()] += hash >> 63 ? 1.0f : -1.0f;
    }
    word.clear();
  };
  for (const char c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) {
      end_word();
    } else {
      word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  end_word();
  float squares = 0;
  for (const float value : features) squares += value * value;
  const float scale = squares > 0 ? 1 / std::sqrt(squares) : 0;
  for (float& value : features) value *= scale;
}

/// Numbers that are normal by the sum of twelve uniform ones: the same bits on every machine.
class Normal {
 public:
  explicit Normal(uint64_t seed) : random_(seed) {}
  float next() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += static_cast<double>(random_() >> 11) * 0x1p-53;
    return static_cast<float>(sum);
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace

Result<Imported> import_apt(uint32_t features) {
  const std::string text = output_of("apt-cache dumpavail 2>/dev/null");
  struct Package {
    std::string_view record;
    int32_t section = -1;
  };
  std::vector<Package> packages;
  std::unordered_map<std::string_view, Vertex> number_of;
  std::unordered_map<std::string_view, int32_t> sections;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find("\n\n", at), text.size());
    const std::string_view record(text.data() + at, end - at);
    at = end + 2;
    const auto trimmed = [](std::string_view field) {
      return field.substr(std::min(field.size(), field.find_first_not_of(' ')));
    };
    const std::string_view name = trimmed(field_of(record, "Package:"));
    std::string_view section = trimmed(field_of(record, "Section:"));
    if (name.empty() || section.empty()) continue;
    section = section.substr(section.find('/') + 1);  // of "non-free/games" the last
    const auto vertex = static_cast<Vertex>(packages.size());
    if (!number_of.emplace(name, vertex).second) continue;
    const auto number = static_cast<int32_t>(sections.size());
    packages.push_back({record, sections.emplace(section, number).first->second});
  }
  if (packages.empty()) {
    return Status(ErrorCode::kUnsupported, "apt-cache knows no package here",
                  "Run apt-get update on a Debian or Ubuntu machine first.");
  }
  std::vector<Edge> edges;
  Imported graph;
  graph.feature_count = features;
  graph.features.resize(packages.size() * features);
  for (Vertex v = 0; v < packages.size(); ++v) {
    const std::string_view record = packages[v].record;
    graph.labels.push_back(packages[v].section);
    for (const char* field : {"Depends:", "Pre-Depends:"}) {
      each_package(field_of(record, field), [&](std::string_view name) {
        const auto to = number_of.find(name);
        if (to != number_of.end()) edges.push_back({v, to->second});
      });
    }
    std::string_view description = field_of(record, "Description-en:");
    if (description.empty()) description = field_of(record, "Description:");
    add_words(description, std::span(graph.features).subspan(size_t{v} * features, features));
  }
  SI_ASSIGN_OR_RETURN(graph.csr, undirected(packages.size(), edges));
  return graph;
}

Result<Imported> import_edges(const std::string& edges_path, const std::string& features,
                              const std::string& labels, uint64_t vertices) {
  SI_ASSIGN_OR_RETURN(const std::string text,
                      base::read_text_file(edges_path, "cannot read the edges", ~uint64_t{0}));
  SI_ASSIGN_OR_RETURN(const auto edges, graph::edges_of_text(text, edges_path));
  Imported graph;
  SI_ASSIGN_OR_RETURN(graph.features_file, NpyFile::open(features));
  SI_ASSIGN_OR_RETURN(const NpyFile classes, NpyFile::open(labels));
  SI_ASSIGN_OR_RETURN(graph.labels, classes.read_all<int32_t>());
  graph.feature_count =
      graph.features_file->shape().size() == 2 ? graph.features_file->shape()[1] : 0;
  SI_ASSIGN_OR_RETURN(graph.csr,
                      undirected(vertices > 0 ? vertices : graph.features_file->rows(), edges));
  return graph;
}

Result<Imported> import_npz(const std::string& path) {
  SI_ASSIGN_OR_RETURN(auto arrays, NpyFile::open_all(path));
  for (const char* name : {"edge_index", "x", "y"}) {
    if (arrays.contains(name)) continue;
    std::string names;
    for (const auto& [there, array] : arrays) names += (names.empty() ? "" : ", ") + there;
    return Status(ErrorCode::kInvalidArgument, fmt::format("{} has no array {}", path, name),
                  fmt::format("It has {}.", names));
  }
  const NpyFile& index = arrays.at("edge_index");
  if (index.shape().size() != 2 || index.shape()[0] != 2) {
    return Status(ErrorCode::kInvalidArgument, "edge_index is not of [2, edges]",
                  "Its first row has where edges begin, its second where they end.");
  }
  SI_ASSIGN_OR_RETURN(const auto ends, index.read_all<Vertex>());
  std::vector<Edge> edges(ends.size() / 2);
  for (size_t i = 0; i < edges.size(); ++i) edges[i] = {ends[i], ends[edges.size() + i]};
  Imported graph;
  graph.features_file = arrays.at("x");
  graph.feature_count =
      graph.features_file->shape().size() == 2 ? graph.features_file->shape()[1] : 0;
  SI_ASSIGN_OR_RETURN(graph.labels, arrays.at("y").read_all<int32_t>());
  SI_ASSIGN_OR_RETURN(graph.csr, undirected(graph.features_file->rows(), edges));
  constexpr std::array<const char*, 3> kMasks{"train_mask", "val_mask", "test_mask"};
  for (size_t i = 0; i < kMasks.size(); ++i) {
    const auto mask = arrays.find(kMasks[i]);
    if (mask == arrays.end()) continue;
    SI_ASSIGN_OR_RETURN(const auto inside, mask->second.read_all<uint8_t>());
    if (inside.size() != graph.csr.vertices()) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("{} has {} values, and the graph has {} vertices", kMasks[i],
                                inside.size(), graph.csr.vertices()));
    }
    graph.split.resize(inside.size(), Split::kNone);
    for (size_t v = 0; v < inside.size(); ++v) {
      if (inside[v] != 0) graph.split[v] = static_cast<Split>(i);
    }
  }
  return graph;
}

Result<Imported> import_rmat(uint32_t scale, double degree, uint32_t features, uint32_t classes,
                             uint64_t seed) {
  const uint64_t vertices = uint64_t{1} << scale;
  // Each edge counts both ways.
  const auto edges = static_cast<uint64_t>(static_cast<double>(vertices) * degree / 2);
  Imported graph;
  SI_ASSIGN_OR_RETURN(graph.csr, undirected(vertices, graph::rmat_edges(vertices, edges, seed)));
  graph.feature_count = features;
  graph.features.resize(vertices * features);
  Normal normal(seed);
  for (float& value : graph.features) value = normal.next();
  std::mt19937_64 random(seed);
  for (uint64_t v = 0; v < vertices; ++v) {
    graph.labels.push_back(static_cast<int32_t>(random() % classes));
  }
  return graph;
}

Result<Imported> import_blocks(uint64_t vertices, double degree, uint32_t features,
                               uint32_t classes, uint64_t seed) {
  const auto count = static_cast<uint64_t>(static_cast<double>(vertices) * degree / 2);
  Imported graph;
  SI_ASSIGN_OR_RETURN(
      graph.csr, undirected(vertices, graph::block_edges(vertices, count, classes, 0.7, seed)));
  graph.feature_count = features;
  Normal normal(seed);
  std::vector<float> means(uint64_t{classes} * features);
  for (float& value : means) value = 0.25f * normal.next();
  for (uint64_t v = 0; v < vertices; ++v) {
    const auto label = static_cast<uint32_t>(v * classes / vertices);
    graph.labels.push_back(static_cast<int32_t>(label));
    for (uint32_t f = 0; f < features; ++f) {
      graph.features.push_back(means[uint64_t{label} * features + f] + normal.next());
    }
  }
  return graph;
}

}  // namespace smartinf::workloads
