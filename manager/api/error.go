package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/pod"
)

// ErrNoManager means that no manager listens on the socket.
var ErrNoManager = errors.New("no device manager answers at")

// ErrNotAllowed means that this process may not connect to the socket.
var ErrNotAllowed = errors.New("this user may not use the device manager at")

// ErrServed means that another manager serves the socket.
var ErrServed = errors.New("another device manager serves it")

// Error is the response to a request that failed.
type Error struct {
	// Text says what failed.
	Text string `json:"error"`
	// Code is the HTTP status of the response.
	Code int `json:"code"`
	// Hint says what the client can do, or is empty.
	Hint string `json:"hint,omitempty"`
	// Reason is the reason in the pod's status if the kubelet would reject the pod (UnexpectedAdmissionError,
	// TopologyAffinityError), and otherwise the reason of a v1.Status, such as NotFound.
	Reason string `json:"reason"`
}

// Error returns the text. If a pod was rejected, the reason comes first.
func (e *Error) Error() string {
	if e.Reason == manager.ReasonUnexpected || e.Reason == manager.ReasonTopology ||
		strings.HasPrefix(e.Reason, manager.ReasonOutOf) {
		return e.Reason + ": " + e.Text
	}
	return e.Text
}

// Unwrap returns the error of the package manager that caused the response, or nil.
func (e *Error) Unwrap() error {
	switch e.Code {
	case http.StatusBadRequest:
		return manager.ErrInvalid
	case http.StatusNotFound:
		return manager.ErrNotFound
	case http.StatusConflict:
		return manager.ErrConflict
	case http.StatusBadGateway:
		return manager.ErrBadResponse
	case http.StatusServiceUnavailable:
		return manager.ErrRetry
	}
	return nil
}

// errorOf returns the response to a request that failed with err.
func errorOf(err error) *Error {
	answer, own := errors.AsType[*Error](err)
	if own {
		return answer
	}
	if answer := leaseError(err); answer != nil {
		return answer
	}
	answer = &Error{Text: shortText(err.Error()), Code: http.StatusInternalServerError, Reason: "InternalError"}
	rejected, isRejected := errors.AsType[*manager.RejectedError](err)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded): // while the request was read
		answer.Code, answer.Reason = http.StatusRequestTimeout, "Timeout"
	case errors.Is(err, manager.ErrInvalid):
		answer.Code, answer.Reason = http.StatusBadRequest, "BadRequest"
	case errors.Is(err, manager.ErrNotFound):
		answer.Code, answer.Reason = http.StatusNotFound, "NotFound"
		answer.Hint = "GET /v1/pods lists the pods, and GET /v1/devices the devices"
	case errors.Is(err, manager.ErrConflict):
		answer.Code, answer.Reason = http.StatusConflict, "Conflict"
		answer.Hint = "GET /v1/pods lists the placed pods; release the pod, or give the new one another UID"
	case errors.Is(err, manager.ErrRetry):
		answer.Code, answer.Reason = http.StatusServiceUnavailable, "ServiceUnavailable"
		answer.Hint = "nothing was changed, and the same request can succeed later"
	case errors.Is(err, manager.ErrBadResponse): // a v1.Status has the reason InternalError for this too
		answer.Code = http.StatusBadGateway
		answer.Hint = "fix the plugin, release the pod, and admit it again"
	case isRejected && rejected.Reason == manager.ReasonOutOfPods:
		answer.Code = http.StatusUnprocessableEntity
		answer.Hint = "GET /v1/pods lists the pods; release those that have ended"
	case isRejected:
		answer.Code = http.StatusUnprocessableEntity
		answer.Hint = "GET /v1/devices lists the devices, their health and the pods that hold them"
	case errors.Is(err, context.DeadlineExceeded):
		answer.Code, answer.Reason = http.StatusGatewayTimeout, "Timeout"
	}
	if isRejected {
		answer.Text, answer.Reason = shortText(rejected.Message), rejected.Reason
	}
	return answer
}

// shortText limits a text, which may quote the request, to what fits into an answer and a log.
func shortText(text string) string { return wording.LimitText(text) }

var errUnknownPeer = &Error{
	Text: "the kernel does not report which process sent the request", Code: http.StatusForbidden, Reason: "Forbidden",
}

// tooMany returns the response to a request that exceeds the limit on concurrent requests.
func tooMany(what string) *Error {
	return &Error{
		Text: "too many " + what, Code: http.StatusTooManyRequests, Reason: "TooManyRequests",
		Hint: "the same request can succeed later",
	}
}

// tooLarge returns the response to a request of more than maxBody bytes.
func tooLarge(q *http.Request) *Error {
	text := fmt.Sprintf("read the request: it is larger than %d KiB", maxBody>>10)
	if q.URL.Path == "/v1/pods" {
		text = pod.ErrTooLarge.Error()
	}
	return &Error{Text: text, Code: http.StatusRequestEntityTooLarge, Reason: "RequestEntityTooLarge"}
}

// badRequest returns the response to a malformed request.
func badRequest(format string, args ...any) *Error {
	text := shortText(fmt.Sprintf(format, args...))
	return &Error{Text: text, Code: http.StatusBadRequest, Reason: "BadRequest"}
}
