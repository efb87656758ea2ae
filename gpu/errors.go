package gpu

import (
	"errors"
	"fmt"
)

// ErrNoDriver means that the host has no NVIDIA driver that can be used.
var ErrNoDriver = errors.New("no usable NVIDIA driver")

// ErrNotAnswering means that the driver has not answered for so long that no device can be used. It wraps ErrNoDriver.
var ErrNotAnswering = fmt.Errorf("%w: it does not answer", ErrNoDriver)

// ErrResetRequired means that the driver does not use a GPU before it is reset.
var ErrResetRequired = errors.New("the GPU requires a reset")

// ErrLibraryClosed means that events of GPUs are not received because the driver's library is closed, for example for
// a reset.
var ErrLibraryClosed = errors.New("the driver's library is closed")
