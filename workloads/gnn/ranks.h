// How a process that torchrun, srun or mpirun has started among others finds these. Their
// collective calls are torch's, so what uses them is a second program, smartinf-gnn-ranks, and
// smartinf-gnn starts without torch.
#pragma once

#include "smartinf/base/status.h"

#include "workloads/gnn/epochs.h"

namespace smartinf::workloads {

/// In smartinf-gnn, where the environment has several ranks: goes on as smartinf-gnn-ranks. Returns
/// 0 where there is nothing to do, else the exit code of a failure that it has printed.
int start_with_ranks(char** arguments);

/// Sets rank, ranks and collectives where the environment has several ranks. Errors:
/// kInvalidArgument, variables of the environment that do not fit; train::join_ranks's.
base::Status join_ranks(RankOptions& ranks);

}  // namespace smartinf::workloads
