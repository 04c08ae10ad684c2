// A device that a server has open for this client: the Device interface over a session.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "smartinf/csd/device.h"
#include "smartinf/serve/client_session.h"

namespace smartinf::serve::wire {

/// name: as in messages. matrices: DeviceShare::matrices.
std::unique_ptr<csd::Device> make_remote_device(std::string name, const Endpoint& endpoint,
                                                const RemoteOptions& options,
                                                std::unique_ptr<ClientSession> session,
                                                Attached attached,
                                                std::vector<compress::MatrixLayout> matrices);

}  // namespace smartinf::serve::wire
