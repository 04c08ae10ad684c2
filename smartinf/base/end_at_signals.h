// What Ctrl-C and SIGTERM do to a program that has nothing to put away.
#pragma once

namespace smartinf::base {

/// First of all in main(): either signal ends the process with exit code 130, as shells have it,
/// and "PROGRAM: interrupted". A signal that came while they were blocked is heeded at once.
/// program: up to 31 characters.
void end_at_signals(const char* program);

}  // namespace smartinf::base
