package main

import (
	"net/http"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/cmd/device-manager/launch"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/manager/conformance"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/nodestatus"
	"gpu-cdi-plugin/manager/state"
)

// errorTable gives the errors of the libraries an exit status and a hint, since libraries know neither statuses nor
// flags. The rows are in the order of the statuses. The first matching row counts, even if an error wraps or joins
// several errors. An error without a row has the status 1 and no hint.
var errorTable = []cli.ErrorRow{
	// Status 1: an error
	cli.Sentinel(trust.ErrUnsafe, cli.Failure, cli.HintUnsafe),
	cli.Sentinel(endpoint.ErrForeignDirectory, cli.Failure,
		"name a new directory with --socket-dir, or if only device plugins use this one, make the file "+
			endpoint.LockName+" in it"),
	cli.Typed(func(*cdi.UntrustedError) (cli.Code, string) { return cli.Failure, cli.HintUnsafe + cli.HintInsecure }),
	cli.Typed(func(*cdi.OtherDriverError) (cli.Code, string) {
		return cli.Failure, "make a new config.json, then inject the devices"
	}),
	cli.Sentinel(cdi.ErrNothingOffered, cli.Failure, "write a CDI spec of the devices to /etc/cdi or --cdi-dir"),
	cli.Sentinel(cdi.ErrStale, cli.Failure, "write the CDI spec of the devices again"),
	cli.Sentinel(conformance.ErrNotStarted, cli.Failure,
		"give a program by its path or by a name in PATH; there is no shell to run it"),
	cli.Sentinel(state.ErrNewer, cli.Failure,
		"start the newer version of this program, or name another directory with --state-dir"),
	cli.Sentinel(kubelet.ErrChecksum, cli.Failure, "the file is damaged, or was changed by hand"),
	cli.Sentinel(manager.ErrPlaced, cli.Failure, "start the manager and release the pod that has it"),
	cli.Sentinel(errPluginEnded, cli.Failure, "its last messages say why"),
	cli.Sentinel(errNoPod, cli.Failure, "device-manager pods lists the pods"),
	cli.Sentinel(api.ErrNotAllowed, cli.Failure, "run as root, or as a member of the group that may use this "+
		"socket: --api-group, --lease-group, or SocketGroup= in its socket unit"),
	cli.Typed(func(e *api.Error) (cli.Code, string) {
		switch {
		case e.Reason == manager.ReasonOutOfPods:
			return cli.Failure, "device-manager pods lists the pods: release those that have ended, or set max-pods"
		case e.Code == http.StatusConflict, e.Code == http.StatusNotFound:
			return cli.Failure, "device-manager pods lists what is placed, and release takes it back"
		case e.Code == http.StatusUnprocessableEntity, e.Code == http.StatusServiceUnavailable:
			return cli.Failure, "device-manager node --devices lists the devices, their health and the pods that have them"
		}
		return cli.Failure, ""
	}),

	// Status 2: a usage error
	cli.Sentinel(endpoint.ErrSameDirectory, cli.Usage,
		"name a directory for --plugins-registry-dir that is neither --socket-dir nor above it"),
	cli.Sentinel(cdi.ErrBadName, cli.Usage, ""),
	cli.Sentinel(conformance.ErrOptions, cli.Usage, "see device-manager conformance --help"),
	cli.Sentinel(wording.ErrQuotes, cli.Usage, ""),
	cli.Sentinel(nodestatus.ErrReserved, cli.Usage, ""),

	// Statuses 12 and 13
	cli.Sentinel(endpoint.ErrInUse, cli.Locked,
		"stop the kubelet or the other manager, or name another directory with --socket-dir and in the plugins' options"),
	cli.Sentinel(endpoint.ErrRegistryInUse, cli.Locked,
		"stop the other manager, or name another directory with --plugins-registry-dir and in the plugins' options"),
	cli.Sentinel(api.ErrServed, cli.Locked, "stop the other manager, or name another socket with --api-socket"),
	cli.Sentinel(state.ErrLocked, cli.Locked, "stop the manager, or name another directory with --state-dir"),
	cli.Sentinel(conformance.ErrInUse, cli.Locked, "stop it, or name another directory with --kubelet-dir"),
	cli.Sentinel(api.ErrNoManager, cli.Unreachable, hintNoManager("device-manager.socket")),
}

// hintNoManager returns a hint for the case that no manager answers. The unit is that of the package for the socket.
func hintNoManager(unit string) string {
	return "start device-manager serve (systemctl start " + unit + ", which works only where there is no " +
		"/var/lib/kubelet/pods, which a kubelet makes), or name the socket that it was given with --api-socket"
}

// leaseErrors are the rows that come first for leases.
var leaseErrors = []cli.ErrorRow{
	cli.Sentinel(api.ErrNoManager, cli.Unreachable, hintNoManager("device-manager-leases.socket")),
	cli.Sentinel(launch.ErrCannotFollow, noLease, "lease devices for a time, with device-manager lease create --for"),
	cli.Sentinel(errLost, noLease, "run the command again; device-manager leases shows whether the lease has ended, and "+
		"lease end ends it"),
	cli.Sentinel(api.ErrNotAllowed, cli.Failure, "run as root, or as a member of the group of this socket: the "+
		"manager's --lease-group, or SocketGroup= in its socket unit"),
	cli.Typed(func(e *api.Error) (cli.Code, string) {
		switch e.Code {
		case http.StatusNotFound:
			return cli.Failure, "device-manager leases lists the leases"
		case http.StatusForbidden:
			return cli.Failure, "run as root, or for leases of others and busy devices as a member of the manager's --api-group"
		case http.StatusUnprocessableEntity:
			return cli.Failure, "ask for devices that it has"
		case http.StatusTooManyRequests:
			return cli.Failure, "device-manager leases shows who waits"
		case http.StatusServiceUnavailable:
			return cli.Failure, "nothing was changed, and the same request can succeed later"
		}
		return cli.Failure, ""
	}),
}

// statuses are the meanings of the exit statuses in the help.
var statuses = map[cli.Code]string{
	cli.OK:          "done",
	cli.Failure:     "an error",
	cli.Usage:       "a usage error, or a wrong value in the environment or the configuration file",
	cli.Differs:     "the plugin breaks a rule",
	cli.Locked:      "another instance is running",
	cli.Unreachable: "there is no manager, or it cannot be reached",
	waitEnded:       "the devices were not free in time",
	noLease:         "the devices cannot be had",
	noExecution:     "the command cannot be executed",
	noCommand:       "the command was not found",
	cli.Interrupted: "interrupted",
}
