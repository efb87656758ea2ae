package dra

import (
	"time"

	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/node"
)

// healthInterval is how often the health of all devices is sent. The kubelet takes it for unknown after 30 s.
const healthInterval = 10 * time.Second

// NodeWatchResources sends the health of all devices at once, at each change, and from time to time. The kubelet writes
// it into the status of the pods that have them.
func (s *server) NodeWatchResources(
	_ *drahealthv1.NodeWatchResourcesRequest, stream drahealthv1.DRAResourceHealth_NodeWatchResourcesServer,
) error {
	for {
		state, changed := s.claims.state.get()
		if state != nil && state.Snapshot != nil {
			answer := &drahealthv1.NodeWatchResourcesResponse{Devices: healthOf(s.claims.node, state, time.Now())}
			if err := stream.Send(answer); err != nil {
				return err
			}
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-s.stopping:
			return nil
		case <-changed:
		case <-time.After(wake.Next(healthInterval)):
		}
	}
}

// healthOf returns the health of all devices. The reason of another state than healthy is one of the device itself.
func healthOf(pool string, s *node.State, now time.Time) []*drahealthv1.DeviceHealth {
	var list []*drahealthv1.DeviceHealth
	for _, o := range offers(s) {
		one := &drahealthv1.DeviceHealth{
			Device:          &drahealthv1.DeviceIdentifier{PoolName: pool, DeviceName: o.name},
			LastUpdatedTime: now.Unix(),
		}
		status := s.Health[o.device.UUID]
		switch status.State {
		case health.Healthy, health.Cordoned: // which only keeps new containers away
			one.Health = drahealthv1.HealthStatus_HEALTHY
		case health.Unhealthy:
			one.Health, one.Message = drahealthv1.HealthStatus_UNHEALTHY, status.Reason
		default: // probes decide
			one.Health, one.Message = drahealthv1.HealthStatus_UNKNOWN, status.Reason
		}
		list = append(list, one)
	}
	return list
}
