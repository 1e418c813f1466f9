// The agents SDK for JavaScript.

import {
  Agent,
  applyPatchTool,
  OpenAIConversationsSession,
  OpenAIProvider,
  OpenAIResponsesCompactionSession,
  Runner,
  RunState,
  shellTool,
  tool,
  toolNamespace,
  toolSearchTool,
  withResponsesWebSocketSession,
} from '@openai/agents';
import OpenAI from 'openai';
import { WebSocket } from 'ws';
import { z } from 'zod';
import { play, read } from './stage.mjs';

// Node has one of its own from version 22 on.
globalThis.WebSocket ??= WebSocket;

await play(({ url, model }) => {
  const client = new OpenAI({ baseURL: url, apiKey: 'any', maxRetries: 0 });
  const runner = new Runner({ modelProvider: new OpenAIProvider({ openAIClient: client }), tracingDisabled: true });
  const asked = [];

  /** A tool that tells of a city, and remembers of which. */
  const teller = (name, heard, more) =>
    tool({
      name,
      description: `Get the ${heard} of a city`,
      parameters: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        asked.push(`${name} ${city}`);
        return heard;
      },
      ...more,
    });

  const poet = new Agent({ name: 'poet', instructions: 'Rhyme.', model });
  const guide = new Agent({
    name: 'guide',
    instructions: 'Find out.',
    model,
    tools: [teller('get_weather', 'mild'), teller('get_time', 'noon')],
    handoffs: [poet],
  });

  const tell = ({ finalOutput, lastAgent }) => ({ text: finalOutput, by: lastAgent.name, asked: asked.sort() });

  /** A run, and one more that needs to know of it. */
  async function twice(first, second, run = runner) {
    const result = await run.run(guide, 'a poem', first);
    const again = await run.run(guide, 'once more', second(result));
    return { ...tell(result), again: again.finalOutput };
  }

  async function use(name, tools) {
    const worker = new Agent({ name: 'worker', model, tools });
    return (await runner.run(worker, `use ${name}`)).finalOutput;
  }

  return {
    chain: () => twice({}, (result) => ({ previousResponseId: result.lastResponseId })),

    async conversation() {
      const { id } = await client.conversations.create();
      const told = await twice({ conversationId: id }, () => ({ conversationId: id }));
      const items = await read(client.conversations.items.list(id, { order: 'asc' }));
      return { ...told, items: items.map(({ type }) => type) };
    },

    async session() {
      const session = new OpenAIConversationsSession({ client });
      const told = await twice({ session }, () => ({ session }));
      const count = (await session.getItems()).length;
      const last = await session.popItem();
      await session.clearSession();
      return { ...told, count, last: last.content[0].text };
    },

    websocket: () =>
      withResponsesWebSocketSession(
        (session) => twice({}, (result) => ({ previousResponseId: result.lastResponseId }), session.runner),
        { providerOptions: { baseURL: url, apiKey: 'any' }, runnerConfig: { tracingDisabled: true } },
      ),

    async streamed() {
      const result = await runner.run(guide, 'a poem', { stream: true });
      const events = await read(result);
      await result.completed;
      const texts = events.flatMap(({ data }) => (data?.type === 'output_text_delta' ? data.delta : []));
      return { ...tell(result), joined: texts.join(''), types: [...new Set(events.map(({ type }) => type))].sort() };
    },

    async structured() {
      const outputType = z.object({ name: z.string(), age: z.number().int() });
      return (await runner.run(new Agent({ name: 'clerk', model, outputType }), 'profile')).finalOutput;
    },

    // The history is the client's: reasoning is sealed on its way.
    async reasoning() {
      const modelSettings = {
        store: false,
        reasoning: { effort: 'low', summary: 'auto' },
        providerData: { include: ['reasoning.encrypted_content'] },
      };
      const worker = new Agent({ name: 'worker', model, modelSettings, tools: [teller('get_weather', 'mild')] });
      const result = await runner.run(worker, 'think');
      return { text: result.finalOutput, items: result.newItems.map(({ type }) => type) };
    },

    // A person is asked, and a later process might go on with the answer.
    async approval() {
      const tools = [teller('get_weather', 'mild', { needsApproval: true })];
      const worker = new Agent({ name: 'worker', model, tools });
      const paused = await runner.run(worker, 'think');
      const state = await RunState.fromString(worker, paused.state.toString());
      const before = [...asked];
      for (const each of state.getInterruptions()) state.approve(each);
      return { before, text: (await runner.run(worker, state)).finalOutput, after: asked };
    },

    async compaction() {
      const session = new OpenAIResponsesCompactionSession({ client, model, shouldTriggerCompaction: () => true });
      const clerk = new Agent({ name: 'clerk', model });
      await runner.run(clerk, 'my name is ada', { session });
      const kept = await session.getItems();
      const again = await runner.run(clerk, 'recall', { session });
      return { kept: kept.map(({ type, role }) => type ?? role), text: again.finalOutput };
    },

    shell: () =>
      use('shell', [
        shellTool({
          shell: {
            run: async ({ commands }) => ({
              output: commands.map((command) => ({
                stdout: `ran ${command}`,
                stderr: '',
                outcome: { type: 'exit', exitCode: 0 },
              })),
            }),
          },
        }),
      ]),

    async apply_patch() {
      const act = async ({ path }) => ({ status: 'completed', output: `created ${path}` });
      return use('apply_patch', [applyPatchTool({ editor: { createFile: act, updateFile: act, deleteFile: act } })]);
    },

    namespace: () =>
      use(
        'namespace',
        toolNamespace({ name: 'sky', description: 'What is above.', tools: [teller('get_weather', 'mild')] }),
      ),

    search: () => use('search', [toolSearchTool(), teller('get_weather', 'mild', { deferLoading: true })]),

    async embedded() {
      const worker = new Agent({
        name: 'worker',
        model,
        modelSettings: { temperature: 0, maxTokens: 40, toolChoice: 'get_weather' },
        tools: [teller('get_weather', 'mild')],
        toolUseBehavior: 'stop_on_first_tool',
      });
      const result = await runner.run(worker, 'What is the weather in Paris?', { maxTurns: 1 });
      return { text: result.finalOutput, asked: asked.map((each) => each.split(' ')[0]) };
    },
  };
});
