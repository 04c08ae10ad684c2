// Stages of a pipeline: which units of a model which ranks compute. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "smartinf/plan/rank_span.h"
#include "smartinf/plan/unit.h"

namespace smartinf::plan {

/// Stages of whole units, each computed by as many ranks: its replicas, which share the micro
/// batches of a step. Rank r is replica r % replicas of stage r / replicas. The model is divided
/// into parts, one after another, which the stages have by turns: chunk c of stage s of S is part
/// c S + s. A head that is folded is one part more, behind all others: the first stage's.
struct Stages {
  std::vector<uint32_t> begin = {0, 0};  // first unit of each part, and the number of units
  uint32_t replicas = 1;
  uint32_t chunks = 1;  // parts of each stage; of several their weights may come from devices
  bool folds = false;   // the first stage, which has the embedding, computes the tied head

  uint32_t parts() const { return static_cast<uint32_t>(begin.size() - 1); }
  uint32_t count() const { return (parts() - (folds ? 1 : 0)) / chunks; }
  /// That the last part is of.
  uint32_t of_head() const { return (parts() - 1) % count(); }
  uint32_t of_rank(uint32_t rank) const { return rank / replicas; }
  uint32_t replica(uint32_t rank) const { return rank % replicas; }
  uint32_t of_unit(uint32_t unit) const;
};

/// A pipeline as one of its ranks has it.
struct Pipeline {
  Stages stages;
  uint32_t rank = 0;
  uint32_t ahead = 0;  // pipeline_actions()

  bool on() const { return stages.count() > 1; }
  uint32_t stage() const { return stages.of_rank(rank); }
  bool has_head() const { return stage() == stages.of_head(); }
  uint32_t chunks() const { return stages.chunks + (stages.folds && stage() == 0 ? 1 : 0); }
  /// Units of a chunk.
  uint32_t begin(uint32_t chunk) const { return stages.begin[part(chunk)]; }
  uint32_t end(uint32_t chunk) const { return stages.begin[part(chunk) + 1]; }
  uint32_t part(uint32_t chunk) const { return chunk * stages.count() + stage(); }
  /// Units whose weights this rank has, ascending. tied: the head computes with unit 0.
  std::vector<uint32_t> units(bool tied) const;
};

/// Divides `units` units among stages so that the largest cost of a stage is the smallest possible;
/// of equal divisions the one whose earlier stages have fewer units. cost: of a stage of units
/// [first, end), not negative. Every stage has one unit at least. SI_CHECK: as many units as
/// stages.
using StageCost = std::function<double(uint32_t stage, uint32_t first, uint32_t end)>;
std::vector<uint32_t> split_units(uint32_t units, uint32_t stages, const StageCost& cost);

/// Shape of a model as computing sees it. Elements are those of matrices, but for what is small.
struct StageCosts {
  std::span<const Unit> units;
  uint64_t width = 0;
  uint64_t head_matrix = 0;  // elements of the matrix that makes logits
  uint64_t sequence = 0;
};
/// Products of a token in forward, relative: each element of a layer once, causal attention's over
/// half of the sequence, the head's matrix once; the embedding is looked up.
double unit_cost(const StageCosts& model, uint32_t unit);

/// Elements of the space by the ranks that compute with them. tied: so many of the first elements
/// are the head's too; that span comes first, as its gradients do. Spans of parts follow.
std::vector<RankSpan> rank_spans(const Stages& stages, std::span<const Unit> units,
                                 uint64_t tied = 0);

}  // namespace smartinf::plan
