package nvml

import (
	"context"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// CloseIdle closes the library if no process uses a GPU of the last snapshot, and none is in persistence mode: as long
// as a process has the library open, GPUs do not suspend. The next snapshot opens it again. CloseIdle reports whether
// the library is closed; it stays open if the driver does not say what it is asked.
func (s *Session) CloseIdle(ctx context.Context) bool {
	s.mu.Lock()
	var devices []gpu.Device
	if s.last != nil && s.library != nil {
		devices = s.last.Devices
	}
	s.mu.Unlock()
	for i := range devices {
		if idle, err := s.idle(ctx, devices[i].UUID); err != nil || !idle {
			return false
		}
	}
	return len(devices) > 0 && s.Close() == nil //nolint:contextcheck // has its own deadline
}

// idle reports whether no process uses a GPU, and persistence mode does not keep it awake.
func (s *Session) idle(ctx context.Context, uuid string) (bool, error) {
	return withLibrary(ctx, s, "idleness of "+uuid, func(l *library, c *call) (bool, error) {
		dev, err := l.deviceByUUID(c, uuid)
		if err != nil {
			return false, err
		}
		mode, err := invoke(l, c, "nvmlDeviceGetPersistenceMode", dev.GetPersistenceMode)
		if err != nil && !isNotSupported(err) || mode == nvml.FEATURE_ENABLED {
			return false, err
		}
		use, err := l.use(c, dev)
		return len(use.Processes) == 0 && !use.ProcessesUnknown, err
	})
}
