// The sequences of a store by number, and which of them have another one's beginning as theirs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "smartinf/base/status.h"
#include "smartinf/engine/key_value_store.h"

namespace smartinf::engine {

inline base::Status sequence_not_open(SequenceId id) {
  return {base::ErrorCode::kNotFound, "sequence " + std::to_string(id) + " is not open"};
}

/// Sequence has: uint64_t tokens_max, and those below.
template <typename Sequence>
struct SharingSequence {
  Sequence* prefix = nullptr;  // in the table
  uint64_t prefix_tokens = 0;
  uint32_t users = 0;   // sequences that have this one as prefix
  bool closed = false;  // as soon as there are none
};

/// Sequences stay where they are.
template <typename Sequence>
class SequenceTable {
 public:
  /// Null: it is not open.
  Sequence* find(SequenceId id) {
    const auto found = all_.find(id);
    return found == all_.end() || found->second.closed ? nullptr : &found->second;
  }
  const Sequence* find(SequenceId id) const { return const_cast<SequenceTable*>(this)->find(id); }
  std::map<SequenceId, Sequence>& all() { return all_; }

  /// What KeyValueStore::open() says before there is room. True: the sequence was closed, and is
  /// open again.
  base::Result<bool> begin_open(SequenceId id, uint64_t tokens_max, const SharedPrefix& prefix) {
    using base::ErrorCode;
    if (const auto found = all_.find(id); found != all_.end()) {
      Sequence& there = found->second;
      if (there.closed && there.tokens_max == tokens_max && prefix.tokens == 0) {
        there.closed = false;
        return true;
      }
      return base::Status(ErrorCode::kAlreadyExists,
                          "sequence " + std::to_string(id) + " is open already");
    }
    if (prefix.tokens == 0) return false;
    const Sequence* shared = find(prefix.id);
    if (shared == nullptr) return sequence_not_open(prefix.id);
    if (prefix.tokens % kernels::kCacheBlockTokens == 0 && prefix.tokens == shared->tokens_max &&
        prefix.tokens < tokens_max && shared->prefix == nullptr) {
      return false;
    }
    return base::Status(ErrorCode::kInvalidArgument,
                        "sequence " + std::to_string(id) + " cannot begin with " +
                            std::to_string(prefix.tokens) + " tokens of sequence " +
                            std::to_string(prefix.id));
  }
  /// The sequence has everything but its prefix.
  Sequence& add(SequenceId id, Sequence sequence, const SharedPrefix& prefix) {
    Sequence& added = all_.emplace(id, std::move(sequence)).first->second;
    if (prefix.tokens > 0) {
      added.prefix = find(prefix.id);
      added.prefix_tokens = prefix.tokens;
      ++added.prefix->users;
    }
    return added;
  }
  /// forget(id, sequence): of one that is closed and that nobody uses, before it is erased.
  template <typename Forget>
  void close(SequenceId id, const Forget& forget) {
    const auto found = all_.find(id);
    if (found == all_.end()) return;
    found->second.closed = true;
    if (found->second.users > 0) return;
    forget(id, found->second);
    Sequence* const prefix = found->second.prefix;
    all_.erase(found);
    if (prefix == nullptr || --prefix->users > 0 || !prefix->closed) return;
    for (const auto& [other, sequence] : all_) {
      if (&sequence == prefix) return close(other, forget);
    }
  }

 private:
  std::map<SequenceId, Sequence> all_;
};

}  // namespace smartinf::engine
