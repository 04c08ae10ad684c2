#include "workloads/gnn/graph_folder.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"

namespace smartinf::workloads {

using base::ErrorCode;
using base::Result;
using base::Status;
using graph::Csr;
using graph::Vertex;

namespace {

constexpr uint64_t kRowsAtOnce = 1 << 14;

std::string in(const std::string& folder, const char* file) {
  return (std::filesystem::path(folder) / file).string();
}

Status misfit(const std::string& what, uint64_t there, uint64_t wanted) {
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("there are {} {}, and the graph has {} vertices", there, what, wanted),
                "Give each vertex one.");
}

Result<Csr> load_csr(const std::string& folder) {
  Result<NpyFile> opened = NpyFile::open(in(folder, kFirstFile));
  if (opened.status().code() == ErrorCode::kNotFound) {
    return Status(ErrorCode::kNotFound, "there is no graph in " + folder,
                  "Make one with smartinf-gnn import.");
  }
  SI_RETURN_IF_ERROR(opened.status());
  const NpyFile first = std::move(*opened);
  SI_ASSIGN_OR_RETURN(const NpyFile neighbours, NpyFile::open(in(folder, kNeighboursFile)));
  SI_ASSIGN_OR_RETURN(auto firsts, first.read_all<uint64_t>());
  SI_ASSIGN_OR_RETURN(auto all, neighbours.read_all<Vertex>());
  auto csr = Csr::of_rows(std::move(firsts), std::move(all));
  if (!csr.ok()) return std::move(csr).status().with_context(folder);
  return csr;
}

/// Of each vertex the lowest 53 bits of a number that looks random, as a share of 1.
double draw(uint64_t seed, uint64_t vertex) {
  const std::array<uint64_t, 1> of{vertex};
  return static_cast<double>(base::checksum(std::as_bytes(std::span(of)), seed) >> 11) * 0x1p-53;
}

}  // namespace

Result<Csr> undirected(uint64_t vertices, std::span<const graph::Edge> edges) {
  SI_ASSIGN_OR_RETURN(const Csr csr, Csr::make(vertices, edges));
  return csr.both_ways().simple();
}

Status write_graph(const std::string& folder, Imported graph, uint64_t seed) {
  const uint64_t vertices = graph.csr.vertices();
  if (graph.labels.size() != vertices) return misfit("classes", graph.labels.size(), vertices);
  const uint64_t rows = graph.features_file
                            ? graph.features_file->rows()
                            : graph.features.size() / std::max<uint64_t>(1, graph.feature_count);
  if (rows != vertices) return misfit("rows of features", rows, vertices);
  if (graph.feature_count == 0) {
    return Status(ErrorCode::kInvalidArgument, "vertices have no features",
                  "Give features of [vertices, features], with one feature at least.");
  }
  if (graph.split.empty()) {
    for (uint64_t v = 0; v < vertices; ++v) {
      const double share = draw(seed, v);
      graph.split.push_back(graph.labels[v] < 0 ? Split::kNone
                            : share < 0.6       ? Split::kTrain
                            : share < 0.8       ? Split::kValidation
                                                : Split::kTest);
    }
  }
  std::error_code error;
  if (std::filesystem::exists(in(folder, kFirstFile), error)) {
    return Status(ErrorCode::kAlreadyExists, fmt::format("{} has a graph already", folder),
                  "Name another folder, or delete this one.");
  }
  std::filesystem::create_directories(folder, error);
  if (error) return base::errno_status(error.value(), "cannot make the folder", folder);
  const std::array<uint64_t, 2> shape{vertices, graph.feature_count};
  SI_ASSIGN_OR_RETURN(NpyWriter features,
                      NpyWriter::create(in(folder, kFeaturesFile), "<f4", shape));
  if (graph.features_file) {
    std::vector<float> some;
    for (uint64_t row = 0; row < vertices; row += kRowsAtOnce) {
      some.resize(std::min(kRowsAtOnce, vertices - row) * graph.feature_count);
      SI_RETURN_IF_ERROR(graph.features_file->read(row * graph.feature_count, std::span(some)));
      SI_RETURN_IF_ERROR(features.append(std::as_bytes(std::span(some))));
    }
  } else {
    SI_RETURN_IF_ERROR(features.append(std::as_bytes(std::span(graph.features))));
  }
  SI_RETURN_IF_ERROR(features.finish());
  SI_RETURN_IF_ERROR(write_npy(in(folder, kLabelsFile), "<i4", graph.labels));
  SI_RETURN_IF_ERROR(write_npy(in(folder, kSplitFile), "|u1", graph.split));
  SI_RETURN_IF_ERROR(write_npy(in(folder, kNeighboursFile), "<u4", graph.csr.all_neighbours(),
                               std::array<uint64_t, 1>{graph.csr.edges()}));
  return write_npy(in(folder, kFirstFile), "<u8", graph.csr.firsts(),
                   std::array<uint64_t, 1>{vertices + 1});
}

Result<Cut> partition_graph(const std::string& folder, uint64_t block_vertices,
                            graph::PartitionMethod method) {
  SI_ASSIGN_OR_RETURN(const Csr csr, load_csr(folder));
  const auto blocks = static_cast<uint32_t>(base::divide_up(csr.vertices(), block_vertices));
  SI_ASSIGN_OR_RETURN(const auto block_of, graph::partition(csr, blocks, method));
  const graph::BlockOrder order = graph::order_blocks(csr, block_of, blocks);
  SI_RETURN_IF_ERROR(write_npy(in(folder, kBlocksFile), "<u4", order.first));
  SI_RETURN_IF_ERROR(write_npy(in(folder, kOrderFile), "<u4", order.order));
  return Cut{blocks, csr.edges(), graph::cut_edges(csr, block_of)};
}

Result<Graph> load_graph(const std::string& folder) {
  SI_ASSIGN_OR_RETURN(const Csr csr, load_csr(folder));
  const uint64_t vertices = csr.vertices();
  const auto order_file = NpyFile::open(in(folder, kOrderFile));
  if (!order_file.ok() && order_file.status().code() == ErrorCode::kNotFound) {
    return Status(ErrorCode::kFailedPrecondition, fmt::format("{} is not partitioned", folder),
                  fmt::format("Run: smartinf-gnn partition {}", folder));
  }
  SI_RETURN_IF_ERROR(order_file.status());
  SI_ASSIGN_OR_RETURN(const NpyFile blocks_file, NpyFile::open(in(folder, kBlocksFile)));
  SI_ASSIGN_OR_RETURN(const NpyFile labels_file, NpyFile::open(in(folder, kLabelsFile)));
  SI_ASSIGN_OR_RETURN(const NpyFile split_file, NpyFile::open(in(folder, kSplitFile)));
  SI_ASSIGN_OR_RETURN(NpyFile features, NpyFile::open(in(folder, kFeaturesFile)));
  SI_ASSIGN_OR_RETURN(auto order, order_file->read_all<Vertex>());
  SI_ASSIGN_OR_RETURN(auto blocks, blocks_file.read_all<Vertex>());
  SI_ASSIGN_OR_RETURN(const auto labels, labels_file.read_all<int32_t>());
  SI_ASSIGN_OR_RETURN(const auto split, split_file.read_all<uint8_t>());
  if (labels.size() != vertices) return misfit("classes", labels.size(), vertices);
  if (split.size() != vertices) return misfit("values of split", split.size(), vertices);
  if (features.rows() != vertices || features.shape().size() != 2) {
    return misfit("rows of features", features.rows(), vertices);
  }
  std::vector<Vertex> sorted = order;
  std::ranges::sort(sorted);
  bool whole = sorted.size() == vertices && blocks.size() > 1 && blocks.front() == 0 &&
               blocks.back() == vertices && std::ranges::is_sorted(blocks);
  for (size_t i = 0; whole && i < sorted.size(); ++i) whole = sorted[i] == i;
  if (!whole) {
    return Status(ErrorCode::kCorrupt,
                  fmt::format("{} does not number each vertex of {} once", kOrderFile, folder),
                  fmt::format("Run: smartinf-gnn partition {}", folder));
  }
  Graph graph{.csr = graph::renumbered(csr, order),
              .order = std::move(order),
              .blocks = std::move(blocks),
              .labels = {},
              .split = {},
              .features = std::move(features)};
  graph.feature_count = static_cast<uint32_t>(graph.features.shape()[1]);
  for (const Vertex vertex : graph.order) {
    const int32_t label = labels[vertex];
    const auto of = static_cast<Split>(std::min<uint8_t>(split[vertex], 3));
    graph.labels.push_back(label);
    graph.split.push_back(label < 0 ? Split::kNone : of);
    graph.classes = std::max(graph.classes, static_cast<uint32_t>(label + 1));
    graph.train_count += graph.split.back() == Split::kTrain;
  }
  if (graph.train_count == 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} has no vertex to train with", folder),
                  "Import it with classes of some vertices that are to be trained with.");
  }
  const auto add = [&](const auto& values) {
    graph.digest = base::checksum(std::as_bytes(std::span(values)), graph.digest);
  };
  add(graph.csr.firsts());
  add(graph.csr.all_neighbours());
  add(graph.blocks);
  add(graph.labels);
  add(graph.split);
  return graph;
}

}  // namespace smartinf::workloads
