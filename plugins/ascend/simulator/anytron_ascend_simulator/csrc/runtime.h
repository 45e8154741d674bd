// What the parts of libascendcl.so share.
#pragma once

namespace runtime {

// The calling thread's device.
int device();

}  // namespace runtime
