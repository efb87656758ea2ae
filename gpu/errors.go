package gpu

import (
	"errors"
	"fmt"
)

// ErrNoDriver is that the node has no NVIDIA driver that can be used.
var ErrNoDriver = errors.New("no usable NVIDIA driver")

// ErrNotAnswering is that the driver has not answered for so long that no device can be used. It wraps ErrNoDriver.
var ErrNotAnswering = fmt.Errorf("%w: it does not answer", ErrNoDriver)

// ErrResetRequired is that the driver does not use a GPU before it is reset.
var ErrResetRequired = errors.New("the GPU requires a reset")

// ErrLibraryClosed is why events of GPUs are not received while the driver's library is closed, as for a reset.
var ErrLibraryClosed = errors.New("the driver's library is closed")
