package dra

import (
	"context"
	"errors"
	"sync"
	"time"

	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/internal/wording"
)

// server is what the kubelet calls: the registration service of plugins_registry, the DRA service and that of the
// devices' health, on one socket.
type server struct {
	drav1.UnimplementedDRAPluginServer
	drahealthv1.UnimplementedDRAResourceHealthServer
	pluginregistration.UnimplementedRegistrationServer

	claims   *claims
	socket   *socket
	observer Observer
	stopping <-chan struct{} // closed when streams must end
}

var (
	_ drav1.DRAPluginServer                 = (*server)(nil)
	_ drahealthv1.DRAResourceHealthServer   = (*server)(nil)
	_ pluginregistration.RegistrationServer = (*server)(nil)
)

// NodePrepareResources prepares claims concurrently. A claim that cannot be prepared has its error in the answer, which
// the kubelet shows in the events of the pod.
func (s *server) NodePrepareResources(
	ctx context.Context, q *drav1.NodePrepareResourcesRequest,
) (*drav1.NodePrepareResourcesResponse, error) {
	answer := &drav1.NodePrepareResourcesResponse{Claims: map[string]*drav1.NodePrepareResourceResponse{}}
	forEach(q.GetClaims(), func(k *drav1.Claim) *drav1.NodePrepareResourceResponse {
		begun := time.Now()
		devices, err := s.claims.prepare(ctx, k)
		s.observer.ClaimHandled(Prepare, err, time.Since(begun))
		if err != nil {
			s.claims.log.Warn("ResourceClaim " + k.GetNamespace() + "/" + k.GetName() + " is not prepared: " + err.Error())
			return &drav1.NodePrepareResourceResponse{Error: textForPod(err)}
		}
		return &drav1.NodePrepareResourceResponse{Devices: devices}
	}, answer.Claims)
	return answer, nil
}

// textForPod returns what the events of a pod may say: they do not name the pods and claims of others.
func textForPod(err error) string {
	if held, ok := errors.AsType[*ledger.HeldError](err); ok {
		return held.UUID + ": another pod has it; the log of gpu-cdi-plugin on the node says which"
	}
	return wording.Limit(err).Error()
}

// NodeUnprepareResources takes the devices of claims back.
func (s *server) NodeUnprepareResources(
	ctx context.Context, q *drav1.NodeUnprepareResourcesRequest,
) (*drav1.NodeUnprepareResourcesResponse, error) {
	answer := &drav1.NodeUnprepareResourcesResponse{Claims: map[string]*drav1.NodeUnprepareResourceResponse{}}
	forEach(q.GetClaims(), func(k *drav1.Claim) *drav1.NodeUnprepareResourceResponse {
		begun := time.Now()
		err := s.claims.unprepare(ctx, k)
		s.observer.ClaimHandled(Unprepare, err, time.Since(begun))
		if err != nil {
			s.claims.log.Warn("ResourceClaim " + k.GetNamespace() + "/" + k.GetName() + " is not unprepared: " + err.Error())
			return &drav1.NodeUnprepareResourceResponse{Error: textForPod(err)}
		}
		return &drav1.NodeUnprepareResourceResponse{}
	}, answer.Claims)
	return answer, nil
}

// forEach calls f for all claims at the same time, and collects the answers by the claims' UIDs.
func forEach[T any](list []*drav1.Claim, f func(*drav1.Claim) T, answers map[string]T) {
	var mu sync.Mutex
	var running sync.WaitGroup
	for _, k := range list {
		running.Go(func() {
			answer := f(k)
			mu.Lock()
			defer mu.Unlock()
			answers[k.GetUid()] = answer
		})
	}
	running.Wait()
}

// GetInfo describes the driver, which serves the same socket.
func (s *server) GetInfo(context.Context, *pluginregistration.InfoRequest) (*pluginregistration.PluginInfo, error) {
	return &pluginregistration.PluginInfo{
		Type: pluginregistration.DRAPlugin, Name: s.claims.driver, Endpoint: s.socket.Path(),
		SupportedVersions: []string{drav1.DRAPluginService, drahealthv1.DRAResourceHealthService},
	}, nil
}

// NotifyRegistrationStatus records whether the kubelet accepted the driver. If it did not, it will try again.
func (s *server) NotifyRegistrationStatus(
	_ context.Context, status *pluginregistration.RegistrationStatus,
) (*pluginregistration.RegistrationStatusResponse, error) {
	var err error
	if !status.GetPluginRegistered() {
		err = errors.New("the kubelet refused the registration: " + status.GetError())
	}
	s.socket.setReason(err)
	return &pluginregistration.RegistrationStatusResponse{}, nil
}
