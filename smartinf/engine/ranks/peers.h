// Ranks that each have a run of their own, over their part of what is trained, and make every step
// together (UpdaterOptions::peers): what they decide in common beside the commit
// (DeviceUpdater). All calls are collective, over Channel::kControl.
#pragma once

#include <memory>
#include <optional>

#include "smartinf/base/status.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/engine/gradient_tracker.h"
#include "smartinf/engine/options.h"
#include "smartinf/engine/ranks/collectives.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {

/// The newest step that all ranks have at least prepared, of what their devices hold; none: all are
/// empty. A run that was killed while it was being made is erased on all of them.
/// Errors, on all ranks: kMismatch where some ranks hold state and others do not, and where no
/// crash explains their steps; what looking at a device fails with.
base::Result<std::optional<base::StepNumber>> agree_on_step(Collectives& peers,
                                                            DeviceSources& sources);
/// Opens this rank's run and brings it to that step. Errors, on all ranks: those, kMismatch where
/// the ranks hold different states, and Updater::open's, of whichever rank.
base::Result<std::unique_ptr<Updater>> open_among_peers(const UpdaterOptions& options,
                                                        const plan::ParameterSpace& space,
                                                        DeviceSources sources);

/// The norm over all ranks, added up in their order by each of them, so that it has the same bits
/// everywhere; the first name of a range that is not finite. Errors: of the first rank that has
/// one.
base::Result<GradientSummary> sum_gradients(Collectives& peers,
                                            const base::Result<GradientSummary>& mine);

}  // namespace smartinf::engine
