package main

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"go.temporal.io/server/common/authorization"
	"go.temporal.io/server/common/cluster"
	"go.temporal.io/server/common/config"
	"go.temporal.io/server/common/dynamicconfig"
	"go.temporal.io/server/common/log"
	"go.temporal.io/server/common/membership/static"
	"go.temporal.io/server/common/metrics"
	"go.temporal.io/server/common/primitives"
	"go.temporal.io/server/temporal"
)

const (
	clusterName = "active"

	// Connections per service and database. Four services use both databases,
	// visibility far less, so at most 4 x (12 + 3) = 60 of the private
	// Postgres's 200 are Temporal's. More would not help: history writes are
	// serialised per shard.
	mainMaxConns       = 12
	visibilityMaxConns = 3
)

// newServer builds the server without starting it, and returns the address
// that its frontend will have. The context is the server's life.
func newServer(ctx context.Context, settings settings, logger log.Logger) (temporal.Server, string, error) {
	host, portText, err := net.SplitHostPort(settings.frontendAddress)
	if err != nil {
		return nil, "", fmt.Errorf("reading the frontend address: %w", err)
	}
	ports, err := freePorts(host, len(temporal.DefaultServices))
	if err != nil {
		return nil, "", err
	}
	if portText != "0" {
		if ports[0], err = strconv.Atoi(portText); err != nil {
			return nil, "", fmt.Errorf("reading the frontend port: %w", err)
		}
	}
	services := map[string]config.Service{}
	hosts := map[primitives.ServiceName]static.Hosts{}
	for i, name := range temporal.DefaultServices { // the frontend is the first of them
		services[name] = config.Service{RPC: config.RPC{GRPCPort: ports[i], BindOnIP: host}}
		hosts[primitives.ServiceName(name)] = static.SingleLocalHost(net.JoinHostPort(host, strconv.Itoa(ports[i])))
	}
	frontendAddress := net.JoinHostPort(host, strconv.Itoa(ports[0]))
	cfg := serverConfig(settings, services, frontendAddress)
	options := []temporal.ServerOption{
		temporal.WithConfig(cfg),
		temporal.ForServices(temporal.DefaultServices),
		// One host per service, known beforehand: without this the services
		// look for each other by gossip, which needs four more ports and, after
		// a restart, waits for the hosts of the run before to expire.
		temporal.WithStaticHosts(hosts),
		temporal.WithDynamicConfigClient(dynamicConfig()),
		temporal.WithAuthorizer(authorization.NewNoopAuthorizer()),
		temporal.WithClaimMapper(func(*config.Config) authorization.ClaimMapper { return authorization.NewNoopClaimMapper() }),
		// Nobody scrapes a child server.
		temporal.WithCustomMetricsHandler(metrics.NoopMetricsHandler),
		temporal.WithLogger(logger),
	}
	if settings.batchCommits {
		flusher, err := newPostgresFlusher(ctx, settings.postgres)
		if err != nil {
			return nil, "", err
		}
		go flusher.run(ctx)
		options = append(options, temporal.WithChainedFrontendGrpcInterceptors(flusher.intercept))
	}
	server, err := temporal.NewServer(options...)
	if err != nil {
		return nil, "", fmt.Errorf("building the Temporal services: %w", err)
	}
	return server, frontendAddress, nil
}

func serverConfig(settings settings, services map[string]config.Service, frontendAddress string) *config.Config {
	postgres := settings.postgres
	if settings.batchCommits {
		postgres = withoutWaiting(postgres)
	}
	return &config.Config{
		Global: config.Global{},
		Persistence: config.Persistence{
			DefaultStore:     mainDatabase,
			VisibilityStore:  visibilityDatabase,
			NumHistoryShards: int32(settings.historyShards),
			DataStores: map[string]config.DataStore{
				mainDatabase:       {SQL: sqlConfig(postgres, mainDatabase, mainMaxConns)},
				visibilityDatabase: {SQL: sqlConfig(postgres, visibilityDatabase, visibilityMaxConns)},
			},
		},
		ClusterMetadata: &cluster.Config{
			FailoverVersionIncrement: 10,
			MasterClusterName:        clusterName,
			CurrentClusterName:       clusterName,
			ClusterInformation: map[string]cluster.ClusterInformation{
				clusterName: {Enabled: true, InitialFailoverVersion: 1, RPCAddress: frontendAddress},
			},
		},
		DCRedirectionPolicy: config.DCRedirectionPolicy{Policy: "noop"},
		Services:            services,
		PublicClient:        config.PublicClient{HostPort: frontendAddress},
		Archival: config.Archival{
			History:    config.HistoryArchival{State: config.ArchivalDisabled},
			Visibility: config.VisibilityArchival{State: config.ArchivalDisabled},
		},
		NamespaceDefaults: config.NamespaceDefaults{
			Archival: config.ArchivalNamespaceDefaults{
				History:    config.HistoryArchivalNamespaceDefaults{State: config.ArchivalDisabled},
				Visibility: config.VisibilityArchivalNamespaceDefaults{State: config.ArchivalDisabled},
			},
		},
	}
}

// dynamicConfig sets what the defaults, made for a large shared cluster, get
// wrong for one process on one machine.
func dynamicConfig() dynamicconfig.StaticClient {
	values := map[dynamicconfig.Key]any{
		// By default a history queue is read at most 20 times a second, which
		// alone adds up to 50 ms to every activity and timer.
		dynamicconfig.TransferProcessorMaxPollRPS.Key(): 2000,
		dynamicconfig.TimerProcessorMaxPollRPS.Key():    2000,
		// The allowance for clocks of several hosts, which the default of 1 s adds to
		// every short timer; here is one host.
		dynamicconfig.TimerProcessorMaxTimeShift.Key(): 50 * time.Millisecond,

		// Rate limits protect tenants from each other; here there is one. The
		// count is of long polls: each worker poller holds one.
		dynamicconfig.FrontendRPS.Key():                                         100_000,
		dynamicconfig.FrontendMaxNamespaceRPSPerInstance.Key():                  100_000,
		dynamicconfig.FrontendMaxConcurrentLongRunningRequestsPerInstance.Key(): 100_000,
		dynamicconfig.HistoryRPS.Key():                                          100_000,
		dynamicconfig.MatchingRPS.Key():                                         100_000,
		dynamicconfig.FrontendPersistenceMaxQPS.Key():                           100_000,
		dynamicconfig.HistoryPersistenceMaxQPS.Key():                            100_000,
		dynamicconfig.MatchingPersistenceMaxQPS.Key():                           100_000,

		// Partitions spread one task queue over hosts; with one host they only
		// forward tasks and pollers to each other.
		dynamicconfig.MatchingNumTaskqueueReadPartitions.Key():  1,
		dynamicconfig.MatchingNumTaskqueueWritePartitions.Key(): 1,

		// Bookkeeping for features and health checks that nobody here uses.
		dynamicconfig.ExternalPayloadsEnabled.Key():                   false,
		dynamicconfig.PersistenceHealthSignalMetricsEnabled.Key():     false,
		dynamicconfig.PersistenceHealthSignalAggregationEnabled.Key(): false,

		// Loopback only: no question to the vendor about newer versions.
		dynamicconfig.EnableServerVersionCheck.Key(): false,
	}
	client := dynamicconfig.StaticClient{}
	for key, value := range values {
		client[key] = []dynamicconfig.ConstrainedValue{{Value: value}}
	}
	return client
}
