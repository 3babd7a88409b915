// KP_EXPORT marks what libkernel_pytorch.so shows to other libraries; everything else is hidden.
#pragma once

#define KP_EXPORT __attribute__((visibility("default")))
