// A graph with features and classes of its vertices, in a folder of NumPy files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/graph/partition.h"

#include "workloads/gnn/npy.h"

namespace smartinf::workloads {

// Files of a folder. V vertices, E neighbours (each edge both ways), F features.
inline constexpr const char* kFirstFile = "first.npy";            // <u8 [V + 1], written last
inline constexpr const char* kNeighboursFile = "neighbours.npy";  // <u4 [E]
inline constexpr const char* kFeaturesFile = "features.npy";      // <f4 [V, F]
inline constexpr const char* kLabelsFile = "labels.npy";          // <i4 [V]; -1: no class
inline constexpr const char* kSplitFile = "split.npy";            // |u1 [V]; Split
inline constexpr const char* kBlocksFile = "blocks.npy";  // <u4 [blocks + 1], written by partition
inline constexpr const char* kOrderFile = "order.npy";    // <u4 [V], written by partition, last

enum class Split : uint8_t { kTrain, kValidation, kTest, kNone };

/// Vertices are numbered block by block. Features stay in their file, whose rows are in the order
/// of the import: row order[i] is vertex i's.
struct Graph {
  graph::Csr csr;
  std::vector<graph::Vertex> order;
  std::vector<graph::Vertex> blocks;  // [blocks + 1]: the vertex that each begins with
  std::vector<int32_t> labels;
  std::vector<Split> split;
  NpyFile features;
  uint32_t feature_count = 0;
  uint32_t classes = 0;
  uint64_t train_count = 0;
  uint64_t digest = 0;  // of everything but the features
};

/// Errors: kFailedPrecondition, the graph is not partitioned; kInvalidArgument, files that do not
/// fit each other, with both sizes; kCorrupt; kIo.
base::Result<Graph> load_graph(const std::string& folder);

/// Cuts it into blocks of about so many vertices, and writes that down. Returns the cut edges and
/// the number of blocks. Errors: of graph::partition(); kIo.
struct Cut {
  uint32_t blocks = 0;
  uint64_t edges = 0;
  uint64_t cut = 0;
};
base::Result<Cut> partition_graph(const std::string& folder, uint64_t block_vertices,
                                  graph::PartitionMethod method);

/// What import makes of any source.
struct Imported {
  graph::Csr csr;  // as read_edges() makes it
  std::vector<int32_t> labels;
  std::vector<Split> split;              // empty: drawn, 60 % train, 20 % validation
  std::optional<NpyFile> features_file;  // or:
  std::vector<float> features;           // [V][feature_count]
  uint64_t feature_count = 0;
};
/// Every edge both ways and once, none from a vertex to itself.
base::Result<graph::Csr> undirected(uint64_t vertices, std::span<const graph::Edge> edges);
/// Errors: kAlreadyExists, the folder has a graph; kInvalidArgument, parts that do not fit each
/// other, with both sizes; kIo.
base::Status write_graph(const std::string& folder, Imported graph, uint64_t seed);

// ---- Sources.

/// The packages that apt knows: their dependencies, sections as classes, and hashed words of their
/// descriptions as features. Errors: kUnsupported, there is no apt or it knows none.
base::Result<Imported> import_apt(uint32_t features);
/// Text of edges, with .npy files of features [V, F] and classes [V].
base::Result<Imported> import_edges(const std::string& edges, const std::string& features,
                                    const std::string& labels, uint64_t vertices);
/// Arrays edge_index [2, E], x [V, F], y [V], and train_mask, val_mask, test_mask [V] or none of
/// them.
base::Result<Imported> import_npz(const std::string& path);
/// Made: of 2^scale vertices by R-MAT with classes and features drawn; or of as many blocks as
/// classes, whose features have the mean of their class and deviation 1.
base::Result<Imported> import_rmat(uint32_t scale, double degree, uint32_t features,
                                   uint32_t classes, uint64_t seed);
base::Result<Imported> import_blocks(uint64_t vertices, double degree, uint32_t features,
                                     uint32_t classes, uint64_t seed);

}  // namespace smartinf::workloads
