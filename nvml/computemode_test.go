package nvml

import (
	"context"
	"errors"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func readComputeMode(t *testing.T, session *Session, uuid string) nvml.ComputeMode {
	t.Helper()
	dev, code := session.library.api.DeviceGetHandleByUUID(uuid)
	if code != nvml.SUCCESS {
		t.Fatal(code)
	}
	mode, code := dev.GetComputeMode()
	if code != nvml.SUCCESS {
		t.Fatal(code)
	}
	return mode
}

func TestSetExclusive(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "pcie-quad")
	session, _ := openNode(t, node)
	uuid, other := node.Machine().GPUs[1].UUID, node.Machine().GPUs[2].UUID
	for _, step := range []struct {
		exclusive bool
		want      nvml.ComputeMode
	}{
		{true, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS},
		{true, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS},
		{false, nvml.COMPUTEMODE_DEFAULT},
	} {
		testenv.Must(t, session.SetExclusive(t.Context(), uuid, step.exclusive))
		if got := readComputeMode(t, session, uuid); got != step.want {
			t.Errorf("exclusive %t: mode %d, want %d", step.exclusive, got, step.want)
		}
		if got := readComputeMode(t, session, other); got != nvml.COMPUTEMODE_DEFAULT {
			t.Errorf("the mode of another GPU is %d", got)
		}
	}
}

func TestSetExclusiveFails(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "pcie-quad")
	session, _ := openNode(t, node)
	uuid := node.Machine().GPUs[1].UUID
	check := func(err, want error, text string) {
		t.Helper()
		if err == nil || want != nil && !errors.Is(err, want) || err.Error() != text {
			t.Errorf("got the error %v, want %q", err, text)
		}
	}
	check(session.SetExclusive(t.Context(), "GPU-none", true), nil,
		"set the compute mode of GPU-none: nvmlDeviceGetHandleByUUID: Not Found")
	fail(t, node, "nvmlDeviceSetComputeMode", 1, nvml.ERROR_NO_PERMISSION)
	check(session.SetExclusive(t.Context(), uuid, true), ErrNoPermission,
		"set the compute mode of "+uuid+": no permission to use the NVIDIA driver: "+
			"nvmlDeviceSetComputeMode: Insufficient Permissions")
	testenv.Must(t, node.Clear())
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	testenv.Must(t, node.Hang("nvmlDeviceSetComputeMode", 1))
	if err := session.SetExclusive(ended, uuid, true); !errors.Is(err, context.Canceled) {
		t.Errorf("after an interrupt: %v", err)
	}
	session.opts.Timeout = 300 * time.Millisecond
	if err := session.SetExclusive(t.Context(), uuid, true); !isTimeout(err) {
		t.Errorf("from a GPU that hangs: %v", err)
	}
	session.opts.Timeout = DefaultTimeout
	testenv.Must(t, session.SetExclusive(t.Context(), node.Machine().GPUs[2].UUID, true))
	testenv.Must(t, node.Clear())
	waitForReturns(t, session)
}
