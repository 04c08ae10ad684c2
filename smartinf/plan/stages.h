// Stages of a pipeline: which units of a model which ranks compute. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "smartinf/plan/unit.h"

namespace smartinf::plan {

/// Elements that only some ranks compute with: these.
struct RankSpan {
  uint64_t first = 0;
  uint64_t count = 0;
  uint32_t first_rank = 0;
  uint32_t ranks = 0;

  uint64_t end() const { return first + count; }
  bool has_rank(uint32_t rank) const { return rank >= first_rank && rank - first_rank < ranks; }
};

/// Stages of whole units, each computed by as many ranks: its replicas, which share the micro
/// batches of a step. Rank r is replica r % replicas of stage r / replicas. The model is divided
/// into parts, one after another, which the stages have by turns: chunk c of stage s of S is part
/// c S + s.
struct Stages {
  std::vector<uint32_t> begin = {0, 0};  // first unit of each part, and the number of units
  uint32_t replicas = 1;
  uint32_t chunks = 1;  // parts of each stage; of several their weights may come from devices

  uint32_t parts() const { return static_cast<uint32_t>(begin.size() - 1); }
  uint32_t count() const { return parts() / chunks; }
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
  bool last() const { return stage() + 1 == stages.count(); }
  /// Units of a chunk.
  uint32_t begin(uint32_t chunk) const { return stages.begin[part(chunk)]; }
  uint32_t end(uint32_t chunk) const { return stages.begin[part(chunk) + 1]; }
  uint32_t part(uint32_t chunk) const { return chunk * stages.count() + stage(); }
  /// Units whose weights this rank has, ascending. tied: the head computes with unit 0.
  std::vector<uint32_t> units(bool tied) const;
};

/// Divides `units` units among stages so that the largest cost of a stage is the smallest possible;
/// of equal divisions the one whose earlier stages have fewer units. cost(first, end): of a stage
/// of these units, not negative. Every stage has one unit at least. SI_CHECK: as many units as
/// stages.
std::vector<uint32_t> split_units(uint32_t units, uint32_t stages,
                                  const std::function<double(uint32_t, uint32_t)>& cost);

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
/// are the last stage's too; that span comes first, as its gradients do. Spans of parts follow.
std::vector<RankSpan> rank_spans(const Stages& stages, std::span<const Unit> units,
                                 uint64_t tied = 0);

}  // namespace smartinf::plan
