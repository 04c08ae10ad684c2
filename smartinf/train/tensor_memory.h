// Where torch's tensors in CPU memory live.
#pragma once

#include <cstddef>

namespace smartinf::train {

/// From now on every tensor of 1 MiB or more in CPU memory gets pages of its own: huge ones where
/// the system gives them. Freed pages wait for the next tensor of their size, never more of them
/// than tensors have needed at once, so that the process is as large as its tensors at their peak
/// (docs/decisions/tensor-memory.md). Once per process, before the first tensor is made; a second
/// call does nothing. Errors, later: c10::OutOfMemoryError from whatever makes a tensor.
/// Threads: tensors are made and freed by any.
void give_tensors_their_own_pages();

/// From now on also tensors of so many bytes. Where most of what is made is dropped at once and
/// some small parts of it stay for long, a heap of it does not shrink again: offloading.
void give_pages_to_tensors_of(size_t bytes);

/// Gives waiting pages back to the system, and forgets what tensors have once needed.
void unmap_waiting_pages();

}  // namespace smartinf::train
