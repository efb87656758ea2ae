package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gpu-cdi-plugin/test/lib/apiservertest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The API server gets the health of all devices, also of one that is not offered. The token may be replaced meanwhile.
func TestServeReportsHealthToTheAPIServer(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t)
	s := newServed(t, "dgx-h100", "report-health: [events, node-condition]\ngpus: {exclude: [2]}\n")
	s.withoutRecoveryAction()
	s.start(append(api.Env(), "GPU_CDI_SERVICE_ACCOUNT_DIR="+api.Dir)...)
	s.kubelet.WaitListed(gpuResource, 7, 0)
	condition := func(status, reason, message string) {
		t.Helper()
		waitFor(t, "the condition "+status+" "+message, func() bool {
			c := api.Condition("GPUsHealthy")
			return c != nil && c.Status == status && c.Reason == reason && c.Message == message
		})
	}
	events := func(messages ...string) {
		t.Helper()
		waitFor(t, "the Events "+strings.Join(messages, ", "), func() bool {
			var got []string
			for _, e := range api.Events() {
				got = append(got, e.Type+" "+e.Reason+" "+e.Message)
			}
			return strings.Join(got, "\n") == strings.Join(messages, "\n")
		})
	}
	condition("True", "AllGPUsHealthy", "all GPUs are healthy")
	events()

	api.Rotate("second")
	s.xid(3, 95, nil)
	const unhealthy = "GPU 3 is unhealthy: XID 95 (uncontained ECC error); it needs a reset"
	s.logs(unhealthy)
	events("Warning GPUUnhealthy " + unhealthy)
	condition("False", "ResetNeeded", unhealthy)

	s.xid(2, 79, nil) // it is not offered
	const lost = "GPU 2 is unhealthy: XID 79 (GPU has fallen off the bus); it needs a reboot of the node"
	condition("False", "RebootNeeded", lost+"; "+unhealthy)
	events("Warning GPUUnhealthy "+unhealthy, "Warning GPUUnhealthy "+lost)

	s.awaitControl()
	s.does("is cordoned", "cordon", "0", "--reason", "a fan is loud")
	s.does("is uncordoned", "uncordon", "0")
	events("Warning GPUUnhealthy "+unhealthy, "Warning GPUUnhealthy "+lost,
		"Normal GPUCordoned GPU 0 is cordoned: a fan is loud",
		"Normal GPUUncordoned GPU 0 is not cordoned any more: it is healthy")
}

// While the driver is released, or its library is gone, the condition does not say that the GPUs are healthy.
func TestServeReportsThatItDoesNotKnowTheHealth(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t)
	s := newServed(t, "pcie-quad", "report-health: [node-condition]\n")
	s.start(append(api.Env(), "GPU_CDI_SERVICE_ACCOUNT_DIR="+api.Dir)...)
	condition := func(status, reason, message string) {
		t.Helper()
		waitFor(t, "the condition "+status+" "+message, func() bool {
			c := api.Condition("GPUsHealthy")
			return c != nil && c.Status == status && c.Reason == reason && strings.Contains(c.Message, message)
		})
	}
	condition("True", "AllGPUsHealthy", "all GPUs are healthy")
	s.awaitControl()
	s.does("the NVIDIA driver is released", "release")
	condition("Unknown", "DriverNotUsable", "no usable NVIDIA driver: an administrator has released the NVIDIA driver")
	s.does("the NVIDIA driver is opened again", "reopen")
	condition("True", "AllGPUsHealthy", "all GPUs are healthy")

	testenv.Must(t, os.Rename(s.node.Library(), s.node.Library()+".away"))
	condition("Unknown", "NotReconciled", "the driver is being replaced: its library was removed")
	testenv.Must(t, os.Rename(s.node.Library()+".away", s.node.Library()))
	condition("True", "AllGPUsHealthy", "all GPUs are healthy")
}

// Without the credentials of a pod serve says so once, and serves.
func TestServeWithoutCredentialsServes(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "report-health: events,node-condition\n")
	s.start("NODE_NAME=n", "KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=1",
		"GPU_CDI_SERVICE_ACCOUNT_DIR="+filepath.Join(s.dir, "none"))
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.withoutRecoveryAction()
	s.xid(3, 95, nil)
	s.onlyUnhealthy(3)
	testenv.Must(t, s.end(syscall.SIGTERM))
	if n := strings.Count(s.log.String(), "API server"); n != 1 {
		t.Errorf("the API server is mentioned %d times:\n%s", n, s.log)
	}
	s.logs("the health of the GPUs is not reported to the API server")
}

// An API server that does not answer delays neither the kubelet's side nor the end.
func TestServeDoesNotWaitForTheAPIServer(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t)
	api.Hang()
	s := newServed(t, "pcie-quad", "report-health: events,node-condition\n")
	s.withoutRecoveryAction()
	s.start(append(api.Env(), "GPU_CDI_SERVICE_ACCOUNT_DIR="+api.Dir)...)
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.xid(3, 95, nil)
	s.onlyUnhealthy(3)
	waitFor(t, "a request", func() bool { return api.Requests() > 0 })
	testenv.Must(t, s.end(syscall.SIGTERM))
}
